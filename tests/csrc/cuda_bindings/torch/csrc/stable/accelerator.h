// In front of torch's header of this name: a device guard that has no device to switch to.
#pragma once
#include <cstdint>

namespace torch::stable::accelerator {

using DeviceIndex = int32_t;

struct DeviceGuard {
  explicit DeviceGuard(DeviceIndex) {}
};

}  // namespace torch::stable::accelerator
