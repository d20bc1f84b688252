#include "backward.cuh"

namespace seq1f1b::cuda {

template int launch_backward<BFloat16, 128>(const Backward&, float*, void*);

}  // namespace seq1f1b::cuda
