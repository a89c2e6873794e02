// Operators that make tensors, look at them in another way, or copy them.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "graphs.h"

namespace simdev {

bool is_ours(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }
void* data_of(const at::Tensor& t) { return t.storage().unsafeGetStorageImpl()->data_ptr().get(); }

at::Tensor as_cpu(const at::Tensor& t) {
  if (!t.defined()) return t;
  const auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  auto* start = static_cast<char*>(data_of(t));
  auto made = start && t.numel()
                  ? at::from_blob(start + t.storage_offset() * t.itemsize(), t.sizes(), t.strides(), [](void*) {},
                                  options, at::Device(at::kCPU))
                  : at::empty_strided(t.sizes(), t.strides(), options);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

at::Tensor empty_on(int device, const at::Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(),
                           at::TensorOptions().dtype(like.dtype()).device(c10::Device(kType, device)));
}

namespace {
using Size = at::IntArrayRef;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

void refuse_pinned(std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
}
at::Tensor empty(Size size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  refuse_pinned(pin);
  const c10::DeviceGuard guard(*device);
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(Size size, Size stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool> pin) {
  refuse_pinned(pin);
  const c10::DeviceGuard guard(*device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

// ---- other looks at the same memory ------------------------------------------------------------

at::Tensor as_strided(const at::Tensor& t, Size size, Size stride, std::optional<int64_t> offset) {
  return at::cpu::as_strided(t, size, stride, offset);
}
at::Tensor view(const at::Tensor& t, Size size) { return at::native::view(t, size); }
at::Tensor reshape_alias(const at::Tensor& t, Size size, Size stride) { return at::native::_reshape_alias(t, size, stride); }
at::Tensor view_as_real(const at::Tensor& t) { return at::native::view_as_real(t); }
at::Tensor view_as_complex(const at::Tensor& t) { return at::native::view_as_complex(t); }
at::Tensor unfold(const at::Tensor& t, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(t, dim, size, step); }
at::Tensor& set_strided(at::Tensor& t, at::Storage storage, int64_t offset, Size size, Size stride) {
  return at::cpu::set_(t, storage, offset, size, stride);
}
at::Tensor& set_storage(at::Tensor& t, at::Storage storage) {
  const int64_t numel = storage.nbytes() / t.itemsize();
  return at::cpu::set_(t, storage, 0, {numel}, {1});
}
at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& other) {
  return at::cpu::set_(t, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
at::Tensor& set_nothing(at::Tensor& t) {
  const c10::DeviceGuard guard(t.device());
  const c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return at::cpu::set_(t, storage, 0, {0}, {});
}
const at::Tensor& resize_(const at::Tensor& t, Size size, std::optional<at::MemoryFormat> format) {
  auto* impl = t.unsafeGetTensorImpl();
  if (t.sizes() == size) return t;
  impl->set_sizes_contiguous(size);
  const size_t needed = (impl->numel() + impl->storage_offset()) * t.itemsize();
  if (needed > t.storage().nbytes()) resize_bytes(t.storage(), needed);
  if (format) impl->empty_tensor_restride(*format);
  return t;
}
void record_stream(at::Tensor& t, c10::Stream s) { record(data_of(t), stream_of(s)); }

// ---- copies ------------------------------------------------------------------------------------

at::Scalar local_scalar(const at::Tensor& t) {
  Stream& s = current_stream(t.device().index());
  s.launch("item", 0, [&] { touch(data_of(t), false, s, "item"); }, [] {});
  s.synchronize();
  return as_cpu(t).item();
}

double copy_cost(const at::Tensor& t) {
  const double rate = costs().copy_gbps;
  return costs().copy_us + (rate > 0 ? t.nbytes() / (rate * 1e3) : 0);
}

// A tensor of the host where devices have it. Nothing of the tensor itself is in what is queued: the
// thread that runs it would need the GIL to let go of one that Python knows.
at::Tensor on_host_side(const at::Tensor& t) {
  return at::from_blob(device_view(t.data_ptr()), t.sizes(), t.strides(), [](void*) {}, t.options(), t.device());
}

// From host to device or back. The host waits unless the copy may be late and the memory is pinned;
// what is not pinned is taken into a staging buffer at once, as CUDA does.
void copy_over(const at::Tensor& from, const at::Tensor& to, bool may_be_late) {
  const bool out = is_ours(from);
  const auto& on_host = out ? to : from;
  Stream& s = current_stream((out ? from : to).device().index());
  const bool pinned = is_pinned(data_of(on_host));
  if (!pinned || !may_be_late) refuse_capturing(s, "a copy that the host waits for: of memory that is not pinned, or not non_blocking");
  if (pinned) record(data_of(on_host), s);
  const bool staged = !pinned && !out && may_be_late;
  const auto source = out ? as_cpu(from) : staged ? from.clone() : on_host_side(from);
  const auto target = out ? on_host_side(to) : as_cpu(to);
  const char* name = out ? "copy to host" : "copy to device";
  s.launch(
      name, copy_cost(to),
      [&] {
        if (!staged) touch(data_of(from), false, s, name);
        touch(data_of(to), true, s, name);
      },
      [source, target]() mutable { target.copy_(source); });
  if (!may_be_late || (!pinned && out)) s.synchronize();
}

// Between devices or on one, in the order of both current streams.
void copy_across(const at::Tensor& from, const at::Tensor& to) {
  const int source = from.device().index(), target = to.device().index();
  Stream &s = current_stream(source), &other = current_stream(target);
  if (source != target) s.wait_for(other.record());
  const char* name = source == target ? "copy" : "copy between devices";
  s.launch(
      name, source == target ? costs().kernel_us.load() : copy_cost(to),
      [&] {
        touch(data_of(from), false, s, name);
        touch(data_of(to), true, s, name);
      },
      [a = as_cpu(from), b = as_cpu(to)]() mutable { b.copy_(a); });
  if (source != target) other.wait_for(s.record());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  auto source = from.is_conj() != to.is_conj() ? from.conj().resolve_conj() : from;
  if (is_ours(source) && is_ours(to))
    copy_across(source, to);
  else
    copy_over(source, to, non_blocking);
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("view_as_real", view_as_real);
  m.impl("view_as_complex", view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_strided);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
}
}  // namespace
}  // namespace simdev
