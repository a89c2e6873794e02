// What operators are on the device: each is run as the CPU's, but for those that need other arguments
// or are composed of others for such a device.
#include <ATen/autocast_mode.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>

#include "calls.h"

namespace simdev {
namespace {
void any_operator(const c10::OperatorHandle& op, Stack* stack) { run_call(op, op, stack); }

// torch hands convolutions of such a device over under names that have no CPU kernel.
void convolution(const c10::OperatorHandle& op, Stack* stack) {
  static const auto real = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_call(op, real, stack);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  static const auto real = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const c10::List<int64_t> bias({weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)});
  Stack stack{grad, input, weight, c10::IValue(bias), stride, padding, dilation, transposed, output_padding, groups, mask};
  run_call(real, real, &stack);
  auto one = [&](size_t i) { return stack[i].isTensor() ? stack[i].toTensor() : at::Tensor(); };
  return {one(0), one(1), one(2)};
}

// An accelerator's layer norm keeps its statistics in single precision, the CPU's in the input's.
void layer_norm_backward(const c10::OperatorHandle& op, Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const auto dtype = (*stack)[first + 1].toTensor().scalar_type();
  const auto& weight = (*stack)[first + 5];
  if (weight.isTensor() && weight.toTensor().defined() && weight.toTensor().scalar_type() == dtype)
    for (size_t i : {3, 4}) (*stack)[first + i] = (*stack)[first + i].toTensor().to(dtype);
  any_operator(op, stack);
}

std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  const auto keep = at::empty_like(x).bernoulli_(1 - p);
  return {x * keep * (p == 1 ? 0 : 1 / (1 - p)), keep.to(at::kBool)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", dropout);
  m.impl("native_layer_norm_backward", torch::CppFunction::makeFromBoxedFunction<&layer_norm_backward>());
  // Composed of others for a device without one of its own, which refuses some memory formats.
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&any_operator>());
  // Composed of their `out=`, in which the CPU's kernel makes what it adds up: of another shape.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&any_operator>());
  m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&any_operator>());
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", convolution_backward);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32)
}
}  // namespace
}  // namespace simdev
