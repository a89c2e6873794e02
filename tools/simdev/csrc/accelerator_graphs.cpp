// Graphs as `torch.accelerator.Graph` makes them, which torch 2.13 and newer have.
#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>

#include "graphs.h"

namespace simdev {
namespace {

const char* name_of(at::GraphCaptureMode mode) {
  switch (mode) {
    case at::GraphCaptureMode::ThreadLocal: return "thread_local";
    case at::GraphCaptureMode::Relaxed: return "relaxed";
    default: return "global";  // what CUDA's default is
  }
}

struct AcceleratorGraph final : at::GraphImplInterface {
  explicit AcceleratorGraph(const at::GraphImplArgs& args) : keeps_(args.keep_graph) {}

  void capture_begin(at::MempoolId_t pool, at::GraphCaptureMode mode) override {
    graph_.capture_begin(static_cast<int64_t>(pool.second), name_of(mode));
  }
  void capture_end() override {
    graph_.capture_end();
    is_captured_ = true;
    if (!keeps_) instantiate();
  }
  void instantiate() override {
    TORCH_CHECK(is_captured_, "simdev: this graph cannot be instantiated: it was not captured to its end");
    TORCH_CHECK(!is_instantiated_ || keeps_, "simdev: this graph was instantiated when its capture ended. "
                "Make it with keep_graph=True to instantiate it by hand.");
    is_instantiated_ = true;
  }
  void replay() override {
    if (is_captured_ && !is_instantiated_) instantiate();
    graph_.replay();
  }
  void reset() override {
    graph_.reset();
    is_captured_ = is_instantiated_ = false;
  }
  at::MempoolId_t pool() const override {
    TORCH_CHECK(is_captured_, "simdev: this graph has no pool: it was not captured to its end");
    return {0, static_cast<uint64_t>(graph_.pool())};
  }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override { TORCH_CHECK(false, "simdev: a graph cannot be dumped, which is not simulated"); }

 private:
  Graph graph_;
  bool keeps_, is_captured_ = false, is_instantiated_ = false;
};

}  // namespace
}  // namespace simdev

namespace at {
REGISTER_GRAPH_IMPL(SIMDEV, simdev::AcceleratorGraph)
}
#endif
