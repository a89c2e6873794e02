#include "clocks.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace simdev {
namespace {
constexpr size_t kMostReports = 1000;
std::vector<std::string> reports;
std::atomic<bool> on{true};

std::string by(const Access& access) {
  return access.op + " on stream " + std::to_string(access.stream);
}
}  // namespace

void merge(Clock& into, const Clock& from) {
  for (int i = 0; i < kStreams; i++) into[i] = std::max(into[i], from[i]);
}

std::recursive_mutex& world() {
  static auto* mutex = new std::recursive_mutex;  // worker threads outlive static objects
  return *mutex;
}

Clock& host_clock() {
  static Clock clock{};
  return clock;
}

bool host_knows(const Clock& clock) {
  for (int i = 0; i < kStreams; i++)
    if (clock[i] > host_clock()[i]) return false;
  return true;
}

void History::clear() {
  write = {};
  reads.clear();
}

bool covers(const Clock& clock, const Access& access) {
  return access.stream == kNoStream || access.tick <= clock[access.stream];
}

void touch(History& history, bool write, const Access& now, const Clock& clock, const std::string& what) {
  if (on) {
    if (!covers(clock, history.write))
      report(by(now) + (write ? " writes " : " reads ") + what + " without waiting for " + by(history.write));
    if (write)
      for (const auto& [_, read] : history.reads)
        if (!covers(clock, read)) report(by(now) + " writes " + what + " still read by " + by(read));
  }
  if (write) {
    history.write = now;
    history.reads.clear();
  } else {
    history.reads[now.stream] = now;
  }
}

void report(std::string text) {
  if (on && reports.size() < kMostReports) reports.push_back(std::move(text));
}

std::vector<std::string> take_reports() {
  std::lock_guard held(world());
  return std::exchange(reports, {});
}

void check_races(bool value) { on = value; }
bool checking() { return on; }

}  // namespace simdev
