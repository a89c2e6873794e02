#include "generators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstring>

#include "runtime.h"

namespace simdev {
namespace {
constexpr int64_t kNotCaptured = -1;
constexpr size_t kCountBytes = sizeof(int64_t);  // of a state in a capture

struct Generator final : c10::GeneratorImpl {
  c10::intrusive_ptr<at::CPUGeneratorImpl> inner;
  int64_t count = kNotCaptured;
  bool drew = false;

  explicit Generator(int device)
      : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(c10::make_intrusive<at::CPUGeneratorImpl>(1000 + device)) {}
  bool captures() const { return count != kNotCaptured; }
  void set_current_seed(uint64_t seed) override {
    TORCH_CHECK(!captures(), "simdev: a generator cannot be seeded while its device captures");
    inner->set_current_seed(seed);
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "simdev: a generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "simdev: a generator has no offset"); }
  uint64_t current_seed() const override { return inner->current_seed(); }
  uint64_t seed() override {
    TORCH_CHECK(!captures(), "simdev: a generator cannot be seeded while its device captures");
    return inner->seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    const bool is_count = static_cast<size_t>(state.numel()) == kCountBytes;
    TORCH_CHECK(is_count == captures(), "simdev: the state of a generator that was read ",
                is_count ? "in a capture cannot be set outside of one" : "outside of a capture cannot be set in one");
    if (is_count)
      memcpy(&count, state.data(), kCountBytes);
    else
      inner->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    if (!captures()) return inner->get_state();
    auto state = at::empty({static_cast<int64_t>(kCountBytes)}, at::TensorOptions().dtype(at::kByte));
    memcpy(state.data_ptr(), &count, kCountBytes);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* twin = new Generator(device().index());
    twin->inner->set_state(*inner->get_state());
    return twin;
  }
};

Generator& impl(const at::Generator& g) { return *static_cast<Generator*>(g.unsafeGetGeneratorImpl()); }
}  // namespace

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int d = 0; d < kDevices; d++) made->push_back(new_generator(d));
    return made;
  }();
  return (*all)[device < 0 ? current_device() : device];
}

at::Generator new_generator(int device) { return at::make_generator<Generator>(device); }
at::Generator cpu_generator_of(const at::Generator& g) { return at::Generator(impl(g).inner); }

void begin_captured_numbers(int device) {
  auto& generator = impl(default_generator(device));
  generator.count = 0;
  generator.drew = false;
}

bool end_captured_numbers(int device) {
  auto& generator = impl(default_generator(device));
  generator.count = kNotCaptured;
  return generator.drew;
}

uint64_t draw_seed(int device) {
  auto& generator = impl(default_generator(device));
  std::lock_guard held(generator.inner->mutex_);
  return generator.inner->random64();
}

uint64_t next_captured(const at::Generator& g) {
  auto& generator = impl(g);
  TORCH_CHECK(generator.captures(), "simdev: only the default generator of the device can be used in a capture");
  generator.drew = true;
  return generator.count++;
}

void seed_captured(at::Generator& cpu, uint64_t seed, uint64_t count) {
  std::lock_guard held(cpu.mutex());
  cpu.set_current_seed(seed + count * 0x9E3779B97F4A7C15);
}

}  // namespace simdev
