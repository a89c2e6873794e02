// How torch reaches the simulated device: guard, events, allocators, hooks.
#include "runtime.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "generators.h"

namespace simdev {

Stream& stream_of(const c10::Stream& s) { return s.id() == 0 ? default_stream(s.device_index()) : stream(s.id()); }

namespace {
c10::Stream wrapped(const Stream& s) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, s.device), s.id < kDevices ? 0 : s.id);
}
int index_or_current(c10::DeviceIndex index) { return index < 0 ? current_device() : index; }

// ---- allocators --------------------------------------------------------------------------------

c10::CachingAllocator::Stat stat(int64_t current, int64_t peak) {
  c10::CachingAllocator::Stat made;
  made.current = current;
  made.peak = peak;
  return made;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const int device = current_device();
    void* data = simdev::allocate(nbytes, device, current_stream(device));
    return {data, data, &release, c10::Device(kType, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override { empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream s) override { record(data.get(), stream_of(s)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Memory m = memory(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stat(m.allocated, m.allocated_peak);
    stats.active_bytes[0] = stat(m.active, m.active_peak);
    stats.reserved_bytes[0] = stat(m.reserved, m.reserved_peak);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peaks(device); }
};

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = allocate_pinned(nbytes);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
  bool record_event(void* data, void*, c10::Stream s) override {
    record(data, stream_of(s));
    return true;
  }
  void empty_cache() override { simdev::empty_cache(); }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override { reset_peaks(kPinned); }
};

DeviceAllocator* device_allocator_ = new DeviceAllocator;
PinnedAllocator* pinned_allocator = new PinnedAllocator;

// ---- hooks, guard ------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_current_device(d); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    const int old = current_device();
    set_current_device(d);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator; }
  c10::Device getDeviceFromPtr(void* data) const override { return c10::Device(kType, device_of(data)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {
    return new_generator(index_or_current(d));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override { resize_bytes(storage, nbytes); }
};

struct TorchEvent {
  std::shared_ptr<Event> recorded;
  int device = -1;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const auto old = getDevice();
    set_current_device(d.index());
    return old;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device d) const override { set_current_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { set_current_device(d.index()); }
  c10::Stream getStream(c10::Device d) const override { return wrapped(current_stream(index_or_current(d.index()))); }
  c10::Stream getDefaultStream(c10::Device d) const override { return wrapped(default_stream(index_or_current(d.index()))); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override { return wrapped(next_of_pool(index_or_current(d.index()))); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const auto old = wrapped(current_stream(s.device_index()));
    set_current_stream(stream_of(s));
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<TorchEvent*>(event); }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new TorchEvent;
    auto* e = static_cast<TorchEvent*>(*event);
    TORCH_CHECK(e->device < 0 || e->device == s.device_index(), "simdev: an event of device ", e->device,
                " cannot be recorded on device ", static_cast<int>(s.device_index()));
    e->device = s.device_index();
    e->recorded = stream_of(s).record();
  }
  static std::shared_ptr<Event> of(void* event) {
    return event ? static_cast<TorchEvent*>(event)->recorded : nullptr;
  }
  void block(void* event, const c10::Stream& s) const override {
    if (auto e = of(event)) stream_of(s).wait_for(e);
  }
  bool queryEvent(void* event) const override {
    auto e = of(event);
    return !e || e->query();
  }
  void synchronizeEvent(void* event) const override {
    if (auto e = of(event)) e->wait();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto *a = static_cast<TorchEvent*>(from), *b = static_cast<TorchEvent*>(to);
    TORCH_CHECK(a->device == b->device, "simdev: there is no time between events of devices ", a->device, " and ",
                b->device);
    TORCH_CHECK(a->recorded->query() && b->recorded->query(), "simdev: both events must be finished");
    const bool in_virtual_time = costs().virtual_time;
    return in_virtual_time ? (b->recorded->virtual_us - a->recorded->virtual_us) / 1000
                           : (b->recorded->real_us() - a->recorded->real_us()) / 1000;
  }

  bool queryStream(const c10::Stream& s) const override { return stream_of(s).query(); }
  void synchronizeStream(const c10::Stream& s) const override { stream_of(s).synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex d) const override { synchronize_device(index_or_current(d)); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    simdev::record(data.get(), stream_of(s));
  }
};

REGISTER_ALLOCATOR(kType, device_allocator_)
at::HostAllocatorRegistry<kType> host_registered(pinned_allocator);
c10::impl::DeviceGuardImplRegistrar guard_registered(kType, new Guard);
}  // namespace

c10::Allocator* device_allocator() { return device_allocator_; }

void resize_bytes(const c10::Storage& storage, size_t nbytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const int device = impl->device().index();
  const c10::DeviceGuard guard(impl->device());
  auto fresh = device_allocator_->allocate(nbytes);
  if (const size_t both = std::min(nbytes, impl->nbytes())) {
    auto& s = current_stream(device);
    void *to = fresh.get(), *from = impl->data_ptr().get();
    s.launch(
        "resize", costs().kernel_us,
        [&] {
          touch(from, false, s, "resize");
          touch(to, true, s, "resize");
        },
        [to, from, both] { memcpy(to, from, both); });
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(nbytes);
}

void register_with_torch() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

}  // namespace simdev
