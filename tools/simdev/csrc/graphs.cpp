#include "graphs.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "generators.h"

namespace simdev {
namespace {
// Hold world.
std::vector<std::shared_ptr<Capture>> underway;
std::vector<int> free_branches[kDevices];
bool branches_made = false;
int64_t pools = 0;

thread_local uint64_t seed_of_thread = 0;

int take_branch(int device) {
  if (!std::exchange(branches_made, true))
    for (int d = 0; d < kDevices; d++)
      for (int i = kBranches; i-- > 0;) free_branches[d].push_back(kFirstBranch + d * kBranches + i);
  auto& free = free_branches[device];
  TORCH_CHECK(!free.empty(), "simdev: graphs that are alive have more than ", kBranches, " branches on device ", device);
  const int id = free.back();
  free.pop_back();
  return id;
}

CaptureMode mode_of(const std::string& name) {
  if (name == "global" || name == "default") return CaptureMode::kGlobal;
  if (name == "thread_local") return CaptureMode::kThreadLocal;
  TORCH_CHECK(name == "relaxed", "simdev: a capture is global, thread_local or relaxed, not ", name);
  return CaptureMode::kRelaxed;
}
}  // namespace

// ---- what is captured --------------------------------------------------------------------------

void Capture::check() const {
  TORCH_CHECK(broken.empty(), "simdev: operation failed due to a previous error during capture: ", broken);
}

void Capture::refuse(const std::string& what) {
  if (broken.empty()) broken = what;
  TORCH_CHECK(false, "simdev: operation not permitted when stream is capturing: ", what);
}

void Capture::add_task(Stream& s, const std::string& name, double cost_us, const std::function<void()>& accesses,
                       std::function<void()> run) {
  check();
  streams[s.id][s.id]++;
  steps.push_back({Step::kTask, s.id, -1, nullptr, name, cost_us, std::move(run)});
  accesses();
}

std::shared_ptr<Event> Capture::record(Stream& s) {
  check();
  const int number = static_cast<int>(events.size());
  events.push_back(streams[s.id]);
  steps.push_back({Step::kRecord, s.id, number});
  return std::make_shared<Event>(s.capture, number);
}

void Capture::wait(Stream& s, const Event& event) {
  check();
  s.capture = event.capture;
  merge(streams[s.id], events[event.number]);
  steps.push_back({Step::kWait, s.id, event.number});
}

bool is_capturing(Stream& s) {
  std::lock_guard held(world());
  return s.capture != nullptr;
}

void refuse_capturing(Stream& s, const char* what) {
  std::lock_guard held(world());
  if (s.capture) s.capture->refuse(what);
}

bool any_capture() { return !underway.empty(); }

bool capturing() { return is_capturing(current_stream(current_device())); }

void refuse_while_capturing(const char* what) {
  std::lock_guard held(world());
  for (auto& each : underway)
    if (each->mode == CaptureMode::kGlobal ||
        (each->mode == CaptureMode::kThreadLocal && each->thread == std::this_thread::get_id()))
      each->refuse(what);
}

void refuse_capturing_device(int device, const char* what) {
  std::lock_guard held(world());
  for (auto& each : underway)
    for (auto& [id, _] : each->streams)
      if (stream(id).device == device) each->refuse(what);
}

// ---- a graph -----------------------------------------------------------------------------------

int64_t new_pool() {
  std::lock_guard held(world());
  return ++pools;
}

uint64_t replayed_seed() { return seed_of_thread; }

void Graph::capture_begin(int64_t pool, const std::string& mode) {
  std::lock_guard held(world());
  TORCH_CHECK(!ready_ && !capture_, "simdev: this graph was captured already. Reset it first.");
  device_ = current_device();
  Stream& s = current_stream(device_);
  TORCH_CHECK(s.id >= kDevices, "simdev: graphs must be captured on a stream that is not a device's default one");
  TORCH_CHECK(!s.capture, "simdev: stream ", s.id, " captures already");
  for (auto& each : underway)
    TORCH_CHECK(each->pool != pool, "simdev: the pool is in use by another capture that is underway");
  const CaptureMode chosen = mode_of(mode);
  if (pool == 0) pool = new_pool();
  if (pool_ != pool) use_pool(pool);
  if (pool_ && pool_ != pool) leave_pool(pool_);
  pool_ = pool;
  origin_ = s.id;
  begin_captured_numbers(device_);
  capture_ = std::make_shared<Capture>(Capture{s.id, pool, chosen});
  capture_->streams[s.id] = Clock{};
  s.capture = capture_;
  underway.push_back(capture_);
}

void Graph::capture_end() {
  std::shared_ptr<Capture> ended;
  {
    std::lock_guard held(world());
    TORCH_CHECK(capture_, "simdev: this graph is not being captured");
    TORCH_CHECK(current_stream(device_).id == origin_, "simdev: a capture must end on the stream it began on");
    ended = std::move(capture_);
    capture_ = nullptr;
    ended->over = true;
    std::erase(underway, ended);
    for (auto& [id, _] : ended->streams) stream(id).capture = nullptr;
    draws_ = end_captured_numbers(device_);
    if (!any_capture()) note_deferred();
    ended->check();
    for (auto& [id, own] : ended->streams)
      TORCH_CHECK(own[id] <= ended->streams[origin_][id], "simdev: a capture ended with work on stream ", id,
                  " that the stream it began on, ", origin_, ", has not waited for");
    for (auto& [id, _] : ended->streams)
      if (id != origin_) branches_[id] = take_branch(stream(id).device);
    steps_ = std::move(ended->steps);
    events_ = ended->events.size();
    ready_ = true;
  }
}

void Graph::run(Step& step, Stream& s, uint64_t seed) {
  if (step.kind == Step::kFree) return freed_in_replay(step.freed, s);
  bool gone = false;
  for (auto& [data, _] : step.touched) gone |= data && !is_there(data, step.name);
  // Its memory is no longer the device's: a real one would write to whatever is there.
  auto run = gone ? std::function<void()>([] {}) : [run = step.run, seed] {
    seed_of_thread = seed;
    auto again = run;  // it may use up what it holds
    again();
  };
  s.enqueue(step.name, step.cost_us, [&] {
    for (auto& [data, write] : step.touched) touch(data, write, s, step.name);
  }, std::move(run));
}

void Graph::replay() {
  TORCH_CHECK(ready_, "simdev: this graph cannot be replayed: it was not captured to its end");
  Stream& origin = current_stream(device_);
  origin.make_room();
  const uint64_t seed = draws_ ? draw_seed(device_) : 0;
  std::lock_guard held(world());
  if (origin.capture) origin.capture->refuse("a graph is replayed in a capture, which is not simulated");
  if (last_) origin.wait_for(last_);  // Rule 5
  std::vector<std::shared_ptr<Event>> events(events_);
  for (auto& step : steps_) {
    Stream& s = step.stream == origin_ ? origin : stream(branches_[step.stream]);
    if (step.kind == Step::kRecord)
      events[step.event] = s.record();
    else if (step.kind == Step::kWait)
      s.wait_for(events[step.event]);
    else
      run(step, s, seed);
  }
  host_waits_until(host_virtual_us() + costs().host_us);
  last_ = origin.record();
}

void Graph::reset() {
  std::lock_guard held(world());
  if (capture_) {
    capture_->over = true;
    std::erase(underway, capture_);
    for (auto& [id, _] : capture_->streams) stream(id).capture = nullptr;
    end_captured_numbers(device_);
    capture_ = nullptr;
    if (!any_capture()) note_deferred();
  }
  for (auto& [id, branch] : branches_) free_branches[stream(id).device].push_back(branch);
  branches_.clear();
  steps_.clear();
  last_ = nullptr;
  ready_ = false;
  if (pool_) leave_pool(std::exchange(pool_, 0));
}

}  // namespace simdev
