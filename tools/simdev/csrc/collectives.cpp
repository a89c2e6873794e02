#include "collectives.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "tensors.h"

namespace simdev {
namespace {
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

struct GroupWork final : c10d::Work {
  GroupWork(int rank, Stream& s, Tensors used, bool blocks)
      : Work(rank), stream_(s), event_(s.record()), used_(std::move(used)), blocks_(blocks) {}
  ~GroupWork() override {
    for (auto& each : used_) record(data_of(each), stream_);  // Rule 2
  }
  bool isCompleted() override { return event_->query(); }
  bool isSuccess() const override { return event_->done(); }
  void synchronize() override {
    current_stream(stream_.device).wait_for(event_);
    used_.clear();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (blocks_ || timeout != kNoTimeout) event_->wait();
    return true;
  }

 private:
  Stream& stream_;
  std::shared_ptr<Event> event_;
  Tensors used_;
  bool blocks_;  // a barrier is for the host
};

double cost_of(const Tensors& read) {
  double bytes = 0;
  for (auto& each : read) bytes += each.nbytes();
  const double rate = costs().comm_gbps;
  return costs().comm_us + (rate > 0 ? bytes / (rate * 1e3) : 0);
}

Tensors on_host(const Tensors& tensors) {
  Tensors made;
  for (auto& each : tensors) made.push_back(as_cpu(each));
  return made;
}

class Group final : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Backend> carrier, int rank, int size) : Backend(rank, size), carrier_(std::move(carrier)) {}
  const std::string getBackendName() const override { return "simccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return started_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    // Only the root's tensor is read, but every rank must have finished writing its own before.
    return start("broadcast", getRank() == opts.rootRank ? tensors : Tensors{}, tensors,
                 [opts, mine = on_host(tensors)](Backend& by) mutable { by.broadcast(mine, opts)->wait(); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto sum = opts;
    const bool mean = opts.reduceOp == c10d::ReduceOp::AVG;
    if (mean) sum.reduceOp = c10d::ReduceOp::SUM;
    return start("all_reduce", tensors, tensors, [sum, mean, size = getSize(), mine = on_host(tensors)](Backend& by) mutable {
      by.allreduce(mine, sum)->wait();
      if (mean) mine[0].div_(size);
    });
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& opts) override {
    return start("all_gather", in, out[0],
                 [opts, to = std::vector<Tensors>{on_host(out[0])}, from = on_host(in)](Backend& by) mutable {
                   by.allgather(to, from, opts)->wait();
                 });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& opts) override {
    return start("all_gather", {in}, {out}, [opts, to = as_cpu(out), from = as_cpu(in)](Backend& by) mutable {
      by._allgather_base(to, from, opts)->wait();
    });
  }
  // Summed in the order of ranks, so that it is the same every time.
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& opts) override {
    const bool mean = opts.reduceOp == c10d::ReduceOp::AVG;
    TORCH_CHECK(mean || opts.reduceOp == c10d::ReduceOp::SUM, "simdev: reduce_scatter knows sum and mean only");
    return start("reduce_scatter", {in}, {out}, [mean, size = getSize(), to = as_cpu(out), from = as_cpu(in)](Backend& by) mutable {
      auto parts = at::empty_like(from);
      std::vector<int64_t> even;
      by.alltoall_base(parts, from, even, even, {})->wait();
      const auto rows = parts.view({size, -1});
      auto flat = to.view(-1);
      flat.copy_(rows[0]);
      for (int rank = 1; rank < size; rank++) flat.add_(rows[rank]);
      if (mean) flat.div_(size);
    });
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits, std::vector<int64_t>& in_splits,
                        const c10d::AllToAllOptions& opts) override {
    return start("all_to_all", {in}, {out},
                 [opts, out_splits, in_splits, to = as_cpu(out), from = as_cpu(in)](Backend& by) mutable {
                   by.alltoall_base(to, from, out_splits, in_splits, opts)->wait();
                 });
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return start("barrier", {}, {}, [](Backend& by) { by.barrier({})->wait(); }, true);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> carrier_;
  Stream* streams_[kDevices] = {};
  uint64_t started_ = 0;

  WorkPtr start(const char* name, const Tensors& read, const Tensors& written, std::function<void(Backend&)> run,
                bool blocks = false) {
    Tensors used(read);
    used.insert(used.end(), written.begin(), written.end());
    const int device = used.empty() ? current_device() : used[0].device().index();
    for (auto& each : used) {
      TORCH_CHECK(is_ours(each) && each.device().index() == device, "simdev: ", name,
                  " of a group of the simulated device needs tensors of one of its devices, got ", each.device(),
                  ". Make the group with 'cpu:gloo,simdev:simccl' where tensors of the host travel too.");
      TORCH_CHECK(each.is_contiguous(), "simdev: ", name, " needs contiguous tensors");
    }
    if (!streams_[device]) streams_[device] = &next_of_pool(device);
    Stream& s = *streams_[device];
    s.wait_for(current_stream(device).record());
    started_++;
    s.launch(
        name, cost_of(read.empty() ? written : read),
        [&] {
          for (auto& each : read) touch(data_of(each), false, s, name);
          for (auto& each : written) touch(data_of(each), true, s, name);
        },
        [carrier = carrier_, run = std::move(run)] { run(*carrier); });
    return c10::make_intrusive<GroupWork>(getRank(), s, std::move(used), blocks);
  }
};
}  // namespace

c10::intrusive_ptr<c10d::Backend> make_group(const c10::intrusive_ptr<c10d::Backend>& carrier, int rank, int size) {
  return c10::make_intrusive<Group>(carrier, rank, size);
}

}  // namespace simdev
