#include "backward.cuh"

namespace seq1f1b::cuda {

template int launch_backward<Float16, 256>(const Backward&, float*, void*);

}  // namespace seq1f1b::cuda
