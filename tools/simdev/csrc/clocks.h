// Vector clocks: which access to memory happened before which, and what races.
//
// Every stream counts its operations. A clock says for each stream up to which operation work is
// known to be done; waiting for an event merges the event's clock. An access races with an earlier
// one on another stream unless the later stream's clock covers it. This depends on the order in
// which a program queues work and on what it waits for, never on how fast anything runs.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace simdev {

constexpr int kDevices = 2;
constexpr int kPool = 32;  // streams of a device besides its default one, handed out in turn
constexpr int kBranches = 16;  // of a device, on which streams that joined a capture are replayed
constexpr int kFirstBranch = kDevices * (1 + kPool);
constexpr int kStreams = kFirstBranch + kDevices * kBranches;
constexpr int kNoStream = -1;

using Clock = std::array<uint64_t, kStreams>;

void merge(Clock& into, const Clock& from);

// Guards clocks, blocks, histories and reports. Never held while something is waited for.
std::recursive_mutex& world();

// What the host knows to be done. All host threads share it: the order that locks between host
// threads make is not seen, so one clock per thread would report races where there are none.
Clock& host_clock();  // hold world
bool host_knows(const Clock& clock);  // hold world

struct Access {
  int stream = kNoStream;
  uint64_t tick = 0;
  std::string op;
};

// The last write to a block of memory, and the reads since, one for each stream.
struct History {
  Access write;
  std::map<int, Access> reads;

  void clear();
};

bool covers(const Clock& clock, const Access& access);

// Adds an access and reports what it races with. `what` names the memory. Hold world.
void touch(History& history, bool write, const Access& now, const Clock& clock, const std::string& what);

void report(std::string text);           // hold world
std::vector<std::string> take_reports();  // all since the last call
void check_races(bool on);
bool checking();

}  // namespace simdev
