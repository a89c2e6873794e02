#include "calls.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include <map>

#include "generators.h"
#include "graphs.h"
#include "shapes.h"
#include "tensors.h"

namespace simdev {
namespace {
std::set<std::string> waited;  // hold world

using Replace = std::function<at::Tensor(const at::Tensor&)>;

bool takes_generator(const c10::Argument& a) { return a.type()->str().find("Generator") != std::string::npos; }
bool is_optional_tensors(const c10::IValue& v) {
  return v.isList() && !v.isTensorList() && v.toList().elementType()->isSubtypeOf(*c10::OptionalType::ofTensor());
}

// One call of an operator, its arguments still on the stack.
class Call {
 public:
  // `runs_as`: the operator whose meta and CPU kernels are run, with the same arguments.
  Call(const c10::OperatorHandle& op, const c10::OperatorHandle& runs_as, Stack* stack)
      : op_(runs_as),
        schema_(op.schema()),
        name_(op.schema().operator_name().name.substr(6) +
              (op.schema().overload_name().empty() ? "" : "." + op.schema().overload_name())),
        count_(op.schema().arguments().size()),
        arguments_(stack->end() - count_, stack->end()) {
    for (size_t i = 0; i < count_; i++) {
      const auto& about = schema_.arguments()[i];
      const bool written = about.alias_info() && about.alias_info()->isWrite();
      each_tensor(arguments_[i], [&](const at::Tensor& t) { note(t, written); });
      if (arguments_[i].isDevice() && device_ < 0) device_ = arguments_[i].toDevice().index();
      random_ = random_ || takes_generator(about);
    }
    if (device_ < 0) device_ = current_device();
  }

  void run(Stack* stack) {
    const c10::DeviceGuard guard(c10::Device(kType, device_));
    stream_ = &current_stream(device_);
    std::vector<c10::IValue> results;
    const bool captured = is_capturing(*stream_);
    if ((random_ && !captured) || !run_late(results)) {
      if (captured) refuse_capturing(*stream_, (name_ + " has no shapes ahead of its kernel, so the host waits for it").c_str());
      run_now(results);
    }
    torch::jit::drop(*stack, count_);
    for (auto& result : results) stack->push_back(std::move(result));
  }

 private:
  template <typename Visit>
  static void each_tensor(const c10::IValue& v, Visit&& visit) {
    if (v.isTensor()) {
      if (v.toTensor().defined()) visit(v.toTensor());
    } else if (v.isTensorList()) {
      for (const at::Tensor& t : v.toTensorVector())
        if (t.defined()) visit(t);
    } else if (v.isList()) {
      for (const auto& each : v.toListRef())
        if (each.isTensor()) visit(each.toTensor());
    }
  }

  void note(const at::Tensor& t, bool written) {
    if (is_ours(t)) {
      if (device_ < 0) device_ = t.device().index();
      TORCH_CHECK(t.device().index() == device_ || t.dim() == 0, "simdev: ", name_, " got tensors on devices ", device_,
                  " and ", static_cast<int>(t.device().index()));
      (written ? written_ : read_).push_back(t);
    } else {
      const bool allowed = !t.is_cpu() || t.dim() == 0 || name_.rfind("index", 0) == 0 || (!written && t.numel() == 1);
      TORCH_CHECK(allowed, "simdev: ", name_, " got a tensor of the CPU beside tensors of the device");
    }
  }

  // The arguments with each tensor replaced, the same one by the same one.
  Stack with(const Replace& replace, c10::DeviceType type, const at::Generator& numbers = {}) const {
    std::map<c10::TensorImpl*, at::Tensor> seen;
    auto one = [&](const at::Tensor& t) {
      if (!t.defined()) return t;
      auto& made = seen[t.unsafeGetTensorImpl()];
      if (!made.defined()) made = replace(t);
      return made;
    };
    Stack out;
    for (size_t i = 0; i < count_; i++) {
      auto v = arguments_[i];
      if (v.isTensor()) {
        v = one(v.toTensor());
      } else if (v.isTensorList()) {
        std::vector<at::Tensor> all;
        for (const at::Tensor& t : v.toTensorVector()) all.push_back(one(t));
        v = all;
      } else if (is_optional_tensors(v)) {
        c10::List<std::optional<at::Tensor>> all;
        for (const auto& each : v.toListRef())
          all.push_back(each.isTensor() ? std::optional<at::Tensor>(one(each.toTensor())) : std::nullopt);
        v = all;
      } else if (v.isDevice()) {
        v = c10::Device(type);
      } else if (takes_generator(schema_.arguments()[i]) && type == c10::kCPU) {
        v = numbers.defined() ? numbers : cpu_generator_of(v.isNone() ? default_generator(device_) : v.toGenerator());
      }
      out.push_back(v);
    }
    return out;
  }

  Stack on_cpu(const at::Generator& numbers = {}) const {
    return with([](const at::Tensor& t) { return is_ours(t) ? as_cpu(t) : t.clone(); }, c10::kCPU, numbers);
  }

  // A generator for the kernel alone, which each replay seeds, and the count it draws at.
  std::pair<at::Generator, uint64_t> captured_numbers() const {
    auto given = default_generator(device_);
    for (size_t i = 0; i < count_; i++)
      if (takes_generator(schema_.arguments()[i]) && !arguments_[i].isNone()) given = arguments_[i].toGenerator();
    return {at::detail::createCPUGenerator(), next_captured(given)};
  }

  // The argument that a result is, of an operator that writes to its arguments.
  std::optional<c10::IValue> written_result(size_t r) const {
    const auto* about = schema_.returns()[r].alias_info();
    if (!about) return std::nullopt;
    TORCH_CHECK(about->isWrite(), "simdev: there is no kernel for the view ", name_);
    for (size_t i = 0; i < count_; i++) {
      const auto* same = schema_.arguments()[i].alias_info();
      if (same && same->isWrite() && *same == *about) return arguments_[i];
    }
    return std::nullopt;
  }

  void accesses(const std::vector<at::Tensor>& also_written) const {
    for (const auto& t : read_) touch(data_of(t), false, *stream_, name_);
    for (const auto& t : written_) touch(data_of(t), true, *stream_, name_);
    for (const auto& t : also_written)
      if (t.defined()) touch(data_of(t), true, *stream_, name_);
  }

  // What the meta kernel says of the results; resizes what is written to, as an `out=` is.
  Outcome ask_meta() {
    const auto key = key_of(name_, arguments_);
    if (key)
      if (auto known = remembered(*key)) return *known;
    Outcome outcome;
    bool resized = false;
    try {
      std::vector<std::pair<at::Tensor, at::Tensor>> metas;
      auto stack = with(
          [&](const at::Tensor& t) {
            if (!is_ours(t)) return t;
            auto meta = at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(at::kMeta));
            metas.emplace_back(t, meta);
            return meta;
          },
          c10::kMeta);
      op_.callBoxed(&stack);
      for (const auto& [t, meta] : metas) {
        if (t.sizes() == meta.sizes()) continue;
        t.resize_(meta.sizes());
        resized = true;
      }
      for (size_t r = 0; r < schema_.returns().size(); r++) outcome.results.push_back(described(r, stack[r]));
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const std::exception&) {
      outcome.known = false;
    }
    for (const auto& result : outcome.results) outcome.known = outcome.known && (result.is_list || result.shapes.size() == 1);
    if (key && !resized) remember(*key, outcome);
    return outcome;
  }

  Result described(size_t r, const c10::IValue& v) const {
    Result result;
    auto add = [&](const at::Tensor& t) {
      if (t.defined())
        result.shapes.push_back({true, t.sizes().vec(), t.strides().vec(), t.scalar_type()});
      else
        result.shapes.emplace_back();
    };
    result.is_list = v.isTensorList();
    if (schema_.returns()[r].alias_info())
      result.shapes.emplace_back();
    else if (v.isTensor())
      add(v.toTensor());
    else if (v.isTensorList())
      for (const at::Tensor& t : v.toTensorVector()) add(t);
    return result;
  }

  // Queues the call with results of the shapes that the meta kernel says; false where it has none.
  bool run_late(std::vector<c10::IValue>& results) {
    const Outcome outcome = ask_meta();
    if (!outcome.known) return false;
    std::vector<at::Tensor> fresh;
    auto make = [&](const Shape& s) {
      const auto options = at::TensorOptions().dtype(s.dtype).device(c10::Device(kType, device_));
      fresh.push_back(s.defined ? at::empty_strided(s.sizes, s.strides, options) : at::Tensor());
      return fresh.back();
    };
    for (size_t r = 0; r < outcome.results.size(); r++) {
      const auto& result = outcome.results[r];
      if (auto same = written_result(r)) {
        results.push_back(*same);
      } else if (result.is_list) {
        std::vector<at::Tensor> all;
        for (const auto& shape : result.shapes) all.push_back(make(shape));
        results.push_back(all);
      } else {
        results.push_back(make(result.shapes[0]));
      }
    }
    std::vector<at::Tensor> targets;
    for (const auto& t : fresh) targets.push_back(as_cpu(t));
    at::Generator numbers;
    uint64_t count = 0;
    if (random_ && is_capturing(*stream_)) std::tie(numbers, count) = captured_numbers();
    std::vector<bool> is_fresh;
    for (const auto& about : schema_.returns()) is_fresh.push_back(about.alias_info() == nullptr);
    stream_->launch(
        name_, costs().kernel_us, [&] { accesses(fresh); },
        [op = op_, stack = on_cpu(numbers), targets, is_fresh, numbers, count]() mutable {
          if (numbers.defined()) seed_captured(numbers, replayed_seed(), count);
          op.callBoxed(&stack);
          size_t next = 0;
          for (size_t r = 0; r < is_fresh.size(); r++) {
            if (!is_fresh[r]) continue;
            std::vector<at::Tensor> made;
            if (stack[r].isTensor()) made = {stack[r].toTensor()};
            else made = stack[r].toTensorVector();
            for (const auto& t : made) {
              auto& target = targets[next++];
              if (!t.defined() || !target.defined() || (t.numel() == 0 && target.numel())) continue;
              TORCH_CHECK(t.sizes() == target.sizes(), "the shape is not the one the meta kernel said");
              target.copy_(t);
            }
          }
        });
    return true;
  }

  // Runs the call while the host waits, and takes the results as they come.
  void run_now(std::vector<c10::IValue>& results) {
    {
      std::lock_guard held(world());
      waited.insert(name_);
    }
    auto stack = std::make_shared<Stack>(on_cpu());
    auto error = std::make_shared<std::string>();
    stream_->launch(
        name_, costs().kernel_us, [&] { accesses({}); },
        [op = op_, stack, error] {
          try {
            op.callBoxed(stack.get());
          } catch (const std::exception& e) {
            *error = e.what();
          }
        });
    stream_->synchronize();
    TORCH_CHECK(error->empty(), *error);
    for (size_t r = 0; r < schema_.returns().size(); r++) {
      auto& v = (*stack)[r];
      if (auto same = written_result(r)) {
        if (same->isTensor() && v.isTensor() && is_ours(same->toTensor()) && same->toTensor().sizes() != v.toTensor().sizes()) {
          auto t = same->toTensor();  // an `out=` of another shape
          t.resize_(v.toTensor().sizes());
          fill(t, v.toTensor());
        }
        results.push_back(*same);
      } else if (v.isTensor()) {
        results.push_back(onto_device(v.toTensor()));
      } else if (v.isTensorList()) {
        std::vector<at::Tensor> all;
        for (const at::Tensor& t : v.toTensorVector()) all.push_back(onto_device(t));
        results.push_back(all);
      } else {
        results.push_back(v);
      }
    }
  }

  at::Tensor onto_device(const at::Tensor& t) {
    if (!t.defined()) return t;
    auto made = empty_on(device_, t);
    fill(made, t);
    return made;
  }
  void fill(const at::Tensor& t, const at::Tensor& from) {
    stream_->launch(
        "result", 0, [&] { touch(data_of(t), true, *stream_, "result of " + name_); },
        [to = as_cpu(t), from]() mutable { to.copy_(from); });
  }

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  std::string name_;
  size_t count_;
  Stack arguments_;
  std::vector<at::Tensor> read_, written_;
  int device_ = -1;
  bool random_ = false;
  Stream* stream_ = nullptr;
};
}  // namespace

void run_call(const c10::OperatorHandle& op, const c10::OperatorHandle& runs_as, Stack* stack) {
  Call(op, runs_as, stack).run(stack);
}

std::set<std::string> waited_operators() {
  std::lock_guard held(world());
  return waited;
}

}  // namespace simdev
