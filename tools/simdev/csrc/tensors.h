// Tensors of the simulated device as their memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "runtime.h"

namespace simdev {

bool is_ours(const at::Tensor& t);
void* data_of(const at::Tensor& t);  // start of its storage
at::Tensor as_cpu(const at::Tensor& t);  // a CPU tensor over the same memory, which it does not own
at::Tensor empty_on(int device, const at::Tensor& like);  // like: shape, strides and dtype

}  // namespace simdev
