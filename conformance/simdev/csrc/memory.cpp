#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "views.h"

namespace simdev {
namespace {
constexpr size_t kSmallest = 512;

struct Block {
  char* data;
  size_t size;
  int place, home;  // device or kPinned; stream or kNoStream
  char* for_devices = nullptr;  // where `data` is the host's view
  Open open = Open::kAll;       // what the host may do, Rule 5
  bool used = true;
  std::set<int> recorded;
  History history;
  std::vector<std::shared_ptr<Event>> pending;

  std::string name() const {
    return (place == kPinned ? "pinned" : "device") + std::string(" block of ") + std::to_string(size) + " bytes" +
           (home == kNoStream ? "" : " of stream " + std::to_string(home));
  }
};

// All of these: hold world.
std::map<uintptr_t, Block*> blocks;  // by address, those kept for later too
std::vector<Block*> held_back;       // Rule 2
std::set<Block*> guarded;            // whose host's view is not all open
std::map<std::tuple<int, int, size_t>, std::vector<Block*>> kept;
Memory totals[kDevices + 1];
int64_t limits[kDevices + 1] = {-1, -1, -1};
std::atomic<bool> poisoning{true};

Block* find(const void* data) {
  auto it = blocks.upper_bound(reinterpret_cast<uintptr_t>(data));
  if (it == blocks.begin()) return nullptr;
  Block* block = std::prev(it)->second;
  return static_cast<const char*>(data) < block->data + block->size ? block : nullptr;
}

void add(int64_t Memory::* now, int64_t Memory::* peak, Memory& total, int64_t bytes) {
  total.*now += bytes;
  total.*peak = std::max(total.*peak, total.*now);
}
void add_allocated(Memory& m, int64_t n) { add(&Memory::allocated, &Memory::allocated_peak, m, n); }
void add_active(Memory& m, int64_t n) { add(&Memory::active, &Memory::active_peak, m, n); }
void add_reserved(Memory& m, int64_t n) { add(&Memory::reserved, &Memory::reserved_peak, m, n); }

Views views_of(const Block& block) { return {block.data, block.for_devices}; }

void open_for_host(Block* block, Open open) {
  if (block->open == open) return;
  block->open = open;
  open_host_view(views_of(*block), block->size, open);
  if (open == Open::kAll)
    guarded.erase(block);
  else
    guarded.insert(block);
}

// The first access that the host would have to wait for; nullptr where there is none.
const Access* ahead_of_host(const Block& block, bool writing) {
  const auto& [write, reads] = block.history;
  if (!covers(host_clock(), write)) return &write;
  if (writing)
    for (const auto& [_, read] : reads)
      if (!covers(host_clock(), read)) return &read;
  return nullptr;
}

Open allowed_to_host(const Block& block) {
  if (ahead_of_host(block, false)) return Open::kNothing;
  return ahead_of_host(block, true) ? Open::kReading : Open::kAll;
}

Block* make(size_t size, int place, int home) {
  auto* block = new Block{nullptr, size, place, home};
  if (place == kPinned) {
    const Views views = map_twice(size);
    block->data = views.host;
    block->for_devices = views.device;
  } else {
    block->data = static_cast<char*>(std::aligned_alloc(kSmallest, size));
  }
  memset(block->data, 0xFF, size);
  blocks[reinterpret_cast<uintptr_t>(block->data)] = block;
  return block;
}

void give_up(Block* block) {
  blocks.erase(reinterpret_cast<uintptr_t>(block->data));
  guarded.erase(block);
  if (block->place == kPinned)
    unmap(views_of(*block), block->size);
  else
    std::free(block->data);
  delete block;
}

void keep(Block* block) {
  block->recorded.clear();
  block->pending.clear();
  block->history.clear();
  add_active(totals[block->place], -static_cast<int64_t>(block->size));
  if (block->home != kNoStream) {
    // What its stream has queued may still use the block: another stream has to wait for it.
    Stream& home = stream(block->home);
    home.tick();
    block->history.write = home.now("the last use of the memory");
    if (poisoning) home.push_silently([data = block->data, size = block->size] { memset(data, 0xFF, size); });
  } else {
    open_for_host(block, Open::kAll);
    if (poisoning) memset(block->data, 0xFE, block->size);
  }
  kept[{block->place, block->home, block->size}].push_back(block);
}

// Asks for what is held back, as the allocator of a real device does: each answer may take a wait
// for the thread that runs the work. Without world, for whoever gives up a tensor needs it.
void ask_for_held_back() {
  std::vector<std::shared_ptr<Event>> asked;
  {
    std::lock_guard held(world());
    for (Block* block : held_back) asked.insert(asked.end(), block->pending.begin(), block->pending.end());
  }
  for (auto& event : asked) event->query();
}

// Keeps what the host knows to be done. Hold world.
void take_back() {
  std::vector<Block*> still;
  for (Block* block : std::exchange(held_back, {})) {
    const auto known = [](auto& event) { return host_knows(event->clock); };
    if (std::all_of(block->pending.begin(), block->pending.end(), known))
      keep(block);
    else
      still.push_back(block);
  }
  held_back.insert(held_back.end(), still.begin(), still.end());
}

void check_freed(const Block& block) {
  Clock known = host_clock();
  if (block.home != kNoStream) merge(known, stream(block.home).clock);
  for (int id : block.recorded) merge(known, stream(id).clock);  // held back until these are done
  auto check = [&](const Access& access, const char* how) {
    if (access.stream == block.home || covers(known, access)) return;
    report("freed " + block.name() + " is still " + how + " by " + access.op + " on stream " +
           std::to_string(access.stream) + ", which was neither waited for nor recorded");
  };
  check(block.history.write, "written");
  for (const auto& [_, read] : block.history.reads) check(read, "read");
}

Block* from_kept(int place, int home, size_t size) {
  auto it = kept.find({place, home, size});
  if (it == kept.end() || it->second.empty()) return nullptr;
  Block* block = it->second.back();
  it->second.pop_back();
  return block;
}

bool fits(int place, size_t size) {
  return limits[place] < 0 || totals[place].reserved + static_cast<int64_t>(size) <= limits[place];
}

void* take(size_t nbytes, int place, int home, size_t size) {
  if (nbytes == 0) return nullptr;
  Block* block = nullptr;
  for (bool last : {false, true}) {
    ask_for_held_back();
    std::unique_lock held(world());
    take_back();
    block = from_kept(place, home, size);
    Memory& total = totals[place];
    if (!block && fits(place, size)) {
      block = make(size, place, home);
      add_reserved(total, size);
      total.made++;
    }
    if (block) {
      block->used = true;
      total.requests++;
      add_allocated(total, size);
      add_active(total, size);
      return block->data;
    }
    held.unlock();
    if (last) break;
    empty_cache();  // Rule 4
  }
  if (place == kPinned) TORCH_CHECK(false, "simdev: out of pinned memory, asked for ", nbytes, " bytes");
  TORCH_CHECK_WITH(OutOfMemoryError, false, "simdev: out of memory on device ", place, ", asked for ", nbytes, " bytes");
}
}  // namespace

void* allocate(size_t nbytes, int device, Stream& home) {
  return take(nbytes, device, home.id, (nbytes + kSmallest - 1) / kSmallest * kSmallest);
}

void* allocate_pinned(size_t nbytes) {
  return take(nbytes, kPinned, kNoStream, std::max(kSmallest, std::bit_ceil(nbytes)));  // as CUDA's
}

void release(void* data) {
  if (!data) return;
  std::lock_guard held(world());
  auto it = blocks.find(reinterpret_cast<uintptr_t>(data));
  if (it == blocks.end()) return;
  Block* block = it->second;
  block->used = false;
  add_allocated(totals[block->place], -static_cast<int64_t>(block->size));
  check_freed(*block);
  for (int id : block->recorded)
    if (id != block->home) block->pending.push_back(stream(id).record());
  if (block->pending.empty())
    keep(block);
  else {
    totals[block->place].held++;
    held_back.push_back(block);
  }
}

void record(const void* data, Stream& stream) {
  std::lock_guard held(world());
  if (Block* block = find(data)) block->recorded.insert(stream.id);
}

bool is_pinned(const void* data) {
  std::lock_guard held(world());
  Block* block = find(data);
  return block && block->place == kPinned;
}

int device_of(const void* data) {
  std::lock_guard held(world());
  Block* block = find(data);
  TORCH_CHECK(block && block->place != kPinned, "simdev: not memory of a device");
  return block->place;
}

void touch(const void* data, bool write, Stream& stream, const std::string& op) {
  Block* block = find(data);
  if (!block) return;
  if (!block->used) report(op + " on stream " + std::to_string(stream.id) + " uses a freed " + block->name());
  touch(block->history, write, stream.now(op), stream.clock, block->name());
  if (block->place == kPinned && checking()) open_for_host(block, allowed_to_host(*block));
}

void* device_view(const void* data) {
  std::lock_guard held(world());
  Block* block = find(data);
  if (!block || !block->for_devices) return const_cast<void*>(data);
  return block->for_devices + (static_cast<const char*>(data) - block->data);
}

bool host_touches(const void* address) {
  std::lock_guard held(world());
  Block* block = find(address);
  if (!block || block->place != kPinned) return false;
  const bool writing = block->open == Open::kReading;
  if (const Access* missed = ahead_of_host(*block, writing))
    report("the host " + std::string(writing ? "writes " : "uses ") + block->name() + " without waiting for " +
           missed->op + " on stream " + std::to_string(missed->stream));
  open_for_host(block, Open::kAll);
  return true;
}

void host_learns(const Clock& clock) {
  std::lock_guard held(world());
  merge(host_clock(), clock);
  for (Block* block : std::set<Block*>(guarded)) open_for_host(block, std::max(block->open, allowed_to_host(*block)));
}

Memory memory(int device) {
  ask_for_held_back();
  std::lock_guard held(world());
  take_back();
  return totals[device];
}

void reset_peaks(int device) {
  std::lock_guard held(world());
  Memory& total = totals[device];
  total.allocated_peak = total.allocated;
  total.active_peak = total.active;
  total.reserved_peak = total.reserved;
}

void empty_cache() {
  std::vector<std::shared_ptr<Event>> waited;
  {
    std::lock_guard held(world());
    for (Block* block : held_back) waited.insert(waited.end(), block->pending.begin(), block->pending.end());
    for (auto& [key, list] : kept)
      if (!list.empty() && std::get<1>(key) != kNoStream) waited.push_back(stream(std::get<1>(key)).record());
  }
  for (auto& event : waited) event->wait();
  std::lock_guard held(world());
  take_back();
  for (auto& [_, list] : kept) {
    std::vector<Block*> busy;
    for (Block* block : list) {
      if (!covers(host_clock(), block->history.write)) {  // freed meanwhile by another thread
        busy.push_back(block);
        continue;
      }
      add_reserved(totals[block->place], -static_cast<int64_t>(block->size));
      give_up(block);
    }
    list = busy;
  }
}

void limit(int device, int64_t reserved_bytes) {
  std::lock_guard held(world());
  limits[device] = reserved_bytes;
}

void poison(bool on) { poisoning = on; }

}  // namespace simdev
