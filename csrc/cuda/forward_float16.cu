#include "forward.cuh"

namespace seq1f1b::cuda {

template int launch_forward<Float16, 64>(const Forward&, void*);
template int launch_forward<Float16, 128>(const Forward&, void*);
template int launch_forward<Float16, 256>(const Forward&, void*);

}  // namespace seq1f1b::cuda
