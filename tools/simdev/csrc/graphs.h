// Graphs: what a stream is given while it captures is noted, and runs each time it is replayed.
//
// Rule 1. A capture begins on one stream. A stream that waits for an event of the capture joins it;
//         at the end the first one has to have waited for all that the others were given.
// Rule 2. What is noted does not run, so nobody can wait for it or ask whether it is done: not the
//         host, and not a stream outside. Nor may a stream of the capture wait for what is outside.
// Rule 3. While anything is captured the host may not ask a device or wait for it at all, nor have
//         it make memory outside of the graph's: not in any thread ("global"), or not in the one that
//         began the capture ("thread_local").
// Rule 4. What breaks a rule breaks the capture: its streams take nothing more, and its end fails.
// Rule 5. A replay is ordered behind what its stream has queued and behind the replay before it.
//         Streams that joined are branches of their own, ordered as in the capture.
// Rule 6. Memory made while capturing is of the graph's pool. A block freed while capturing is
//         handed out again in the capture, in the order of its stream; each replay writes the same
//         addresses. The pool goes when nobody holds a graph of it any more.
#pragma once

#include <map>
#include <thread>

#include "memory.h"

namespace simdev {

struct Step {  // of a capture, in the order of the program
  enum Kind { kTask, kRecord, kWait, kFree } kind;
  int stream;
  int event = -1;            // of a record or a wait
  void* freed = nullptr;
  std::string name = "";
  double cost_us = 0;
  std::function<void()> run = nullptr;
  std::vector<std::pair<void*, bool>> touched = {};  // and whether it is written
};

enum class CaptureMode { kGlobal, kThreadLocal, kRelaxed };

struct Capture {  // hold world
  int origin;
  int64_t pool;
  CaptureMode mode;
  std::thread::id thread = std::this_thread::get_id();
  bool over = false;
  std::string broken = "";       // by what, Rule 4
  std::map<int, Clock> streams;  // that take part: what of each is ahead of what each is given next
  std::vector<Step> steps;
  std::vector<Clock> events;  // by number

  void check() const;  // that it is not broken
  [[noreturn]] void refuse(const std::string& what);
  void add_task(Stream& s, const std::string& name, double cost_us, const std::function<void()>& accesses,
                std::function<void()> run);
  std::shared_ptr<Event> record(Stream& s);
  void wait(Stream& s, const Event& event);  // that stream joins it if it did not yet
  void touch(const void* data, bool write) { steps.back().touched.emplace_back(const_cast<void*>(data), write); }
  void freed(void* data, int stream) { steps.push_back({Step::kFree, stream, -1, data}); }
};

bool is_capturing(Stream& s);
void refuse_capturing(Stream& s, const char* what);  // where that stream is
bool any_capture();                            // whether anything is captured; hold world
void refuse_while_capturing(const char* what);  // Rule 3
void refuse_capturing_device(int device, const char* what);
uint64_t replayed_seed();  // of the replay whose work this thread runs

class Graph {
 public:
  Graph() = default;
  ~Graph() { reset(); }
  Graph(const Graph&) = delete;
  void capture_begin(int64_t pool, const std::string& mode);  // 0: a pool of its own
  void capture_end();
  void replay();
  void reset();
  int64_t pool() const { return pool_; }

 private:
  void run(Step& step, Stream& s, uint64_t seed);
  int64_t pool_ = 0;
  int device_ = -1, origin_ = -1;
  bool ready_ = false, draws_ = false;
  std::shared_ptr<Capture> capture_;
  std::vector<Step> steps_;
  std::map<int, int> branches_;  // streams of the capture to those that run their work
  size_t events_ = 0;
  std::shared_ptr<Event> last_;  // the end of the last replay
};

int64_t new_pool();
bool capturing();  // whether the current stream of the current device is

}  // namespace simdev
