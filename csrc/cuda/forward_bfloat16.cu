#include "forward.cuh"

namespace seq1f1b::cuda {

template int launch_forward<BFloat16, 64>(const Forward&, void*);
template int launch_forward<BFloat16, 128>(const Forward&, void*);
template int launch_forward<BFloat16, 256>(const Forward&, void*);

}  // namespace seq1f1b::cuda
