// Streams and events: queues of work that run beside the host and beside each other.
//
// Each stream is a thread that runs its tasks in order. Time can be real (a task sleeps as long as
// it is said to take) or virtual: then every task runs at once, and start and end are computed from
// the order of the queues, so that "is it done?" and every measured time are the same on every
// machine. Faults and closed gates are here too, for they are properties of a queue.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "clocks.h"

namespace simdev {

// How long things take, in microseconds; set by `simulate`.
struct Costs {
  std::atomic<double> kernel_us{0}, copy_us{0}, copy_gbps{0}, host_us{0}, comm_us{0}, comm_gbps{0};
  std::atomic<bool> jitter{false}, virtual_time{false}, log{false};
  std::atomic<int> queue_limit{0};  // the host waits while a stream has that many tasks; 0: none
};
Costs& costs();

struct Capture;

struct Event {  // one recording of one event
  Event(const Clock& c, double at) : clock(c), virtual_us(at) {}
  Event(std::shared_ptr<Capture> of, int n) : clock{}, virtual_us(0), capture(std::move(of)), number(n) {}
  const Clock clock;
  const double virtual_us;
  const std::shared_ptr<Capture> capture;  // that it was recorded in, as its `number`-th; or none
  const int number = -1;
  void finish();
  bool done() const;
  void refuse_captured(const char* what) const;  // graphs.h, Rules 2 and 3
  bool query();       // what a program is told; the host learns of it. Do not hold world
  void wait();        // the host waits, and learns of it
  void await_done();  // waits without telling the host's clock
  double real_us() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  double real_us_ = 0;
};

class Stream {
 public:
  int id = 0, device = 0;

  // Queues an operation that takes `cost_us`. `accesses` runs under the lock with the stream's
  // clock already advanced, and notes what is read and written.
  // Of a stream that captures, it is noted instead.
  void launch(const std::string& name, double cost_us, const std::function<void()>& accesses, std::function<void()> run);
  void make_room();  // waits while the queue is full
  // The same as `launch` of what is replayed: at no cost for the host. Hold world.
  void enqueue(const std::string& name, double cost_us, const std::function<void()>& accesses, std::function<void()> run);
  std::shared_ptr<Event> record();
  void wait_for(const std::shared_ptr<Event>& event);  // later work starts after it
  void synchronize();                                  // the host waits, and learns of it
  bool query();
  void close_gate();  // what is queued from now on waits for `open_gates`
  Clock clock{};      // hold world
  std::shared_ptr<Capture> capture;  // that it takes part in; hold world
  Access now(const std::string& op) const { return {id, clock[id], op}; }  // hold world
  // Queues something the simulation does for itself, without time and without checks. Hold world.
  void push_silently(std::function<void()> run);
  void tick();  // hold world

 private:
  struct Task {
    std::string name;
    double cost_us, queued, start, end;
    std::function<void()> run;
  };
  void push(Task task);
  void work();
  void drain();
  double virtual_us_ = 0;  // when all that is queued will be done; hold world
  std::mutex mutex_;
  std::condition_variable filled_, emptied_;
  std::deque<Task> queue_;
  bool busy_ = false, started_ = false;
  std::mt19937 random_;
};

Stream& stream(int id);
Stream& default_stream(int device);
Stream& next_of_pool(int device);
Stream& current_stream(int device);
void set_current_stream(Stream& stream);
int current_device();
void set_current_device(int device);
void synchronize_device(int device);
void open_gates();

constexpr auto kStuck = std::chrono::seconds(60);  // for which anything is waited for

double now_us();  // real
double host_virtual_us();
void host_waits_until(double virtual_us);  // hold world
bool any_gate_closed();

// Fails the operation that is the `after`-th from now whose name starts with `prefix`: it writes
// nothing, and the host is told the next time it waits.
void fail_later(const std::string& prefix, int after);
void raise_failure();

struct Row {
  int stream;
  std::string name;
  double queued, start, end;
};
std::vector<Row> take_timeline();

struct WithoutGil {  // while the host waits, other Python threads run
  WithoutGil();
  ~WithoutGil();
  void* state = nullptr;
};

}  // namespace simdev
