#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "blocks.h"
#include "graphs.h"

namespace simdev {
namespace {
constexpr size_t kSmallest = 512;

// All of these: hold world.
std::vector<Block*> held_back;       // Rule 2
std::vector<Block*> deferred;        // freed while something is captured, and recorded on streams
using Key = std::tuple<int64_t, int, int, size_t>;  // pool, place, home, size
std::map<Key, std::vector<Block*>> kept;
std::map<int64_t, int> pools;  // graphs of each
Memory totals[kDevices + 1];
int64_t limits[kDevices + 1] = {-1, -1, -1};
std::atomic<bool> poisoning{true};

// Streams that may still use what is kept for later.
std::set<int> users_of_kept() {
  std::set<int> users;
  for (auto& [key, list] : kept)
    for (Block* block : list) {
      users.insert({block->home, block->history.write.stream});
      for (auto& [id, _] : block->history.reads) users.insert(id);
    }
  users.erase(kNoStream);
  return users;
}

void add(int64_t Memory::* now, int64_t Memory::* peak, Memory& total, int64_t bytes) {
  total.*now += bytes;
  total.*peak = std::max(total.*peak, total.*now);
}
void add_allocated(Memory& m, int64_t n) { add(&Memory::allocated, &Memory::allocated_peak, m, n); }
void add_active(Memory& m, int64_t n) { add(&Memory::active, &Memory::active_peak, m, n); }
void add_reserved(Memory& m, int64_t n) { add(&Memory::reserved, &Memory::reserved_peak, m, n); }

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
  blocks()[reinterpret_cast<uintptr_t>(block->data)] = block;
  return block;
}

void give_up(Block* block) {
  blocks().erase(reinterpret_cast<uintptr_t>(block->data));
  close_no_more(block);
  if (block->place == kPinned)
    unmap({block->data, block->for_devices}, block->size);
  else
    std::free(block->data);
  delete block;
}

Key key_of(const Block& block) { return {block.pool, block.place, block.home, block.size}; }

void keep(Block* block) {
  block->recorded.clear();
  block->pending.clear();
  add_active(totals[block->place], -static_cast<int64_t>(block->size));
  kept[key_of(*block)].push_back(block);
  if (block->pool) {  // its graphs say what was done with it, each time they are replayed
    const auto capture = block->home == kNoStream ? nullptr : stream(block->home).capture;
    if (capture && capture->pool == block->pool) capture->freed(block->data, block->home);
    return;
  }
  block->history.clear();
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
}

// Asks for what is held back, as the allocator of a real device does: each answer may take a wait
// for the thread that runs the work. Without world, for whoever gives up a tensor needs it.
void ask_for_held_back() {
  std::vector<std::shared_ptr<Event>> asked;
  {
    std::lock_guard held(world());
    if (any_capture()) return;  // graphs.h, Rule 3
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

void check_freed(const Block& block, Clock known, int home) {
  auto check = [&](const Access& access, const char* how) {
    if (access.stream == home || covers(known, access)) return;
    report("freed " + block.name() + " is still " + how + " by " + access.op + " on stream " +
           std::to_string(access.stream) + ", which was neither waited for nor recorded");
  };
  check(block.history.write, "written");
  for (const auto& [_, read] : block.history.reads) check(read, "read");
}

void check_freed(const Block& block) {
  Clock known = host_clock();
  if (block.home != kNoStream) merge(known, stream(block.home).clock);
  for (int id : block.recorded) merge(known, stream(id).clock);  // held back until these are done
  check_freed(block, known, block.home);
}

void note_recorded(Block* block) {
  for (int id : block->recorded) block->pending.push_back(stream(id).record());
}

Block* from_kept(const Key& key) {
  auto it = kept.find(key);
  if (it == kept.end() || it->second.empty()) return nullptr;
  Block* block = it->second.back();
  it->second.pop_back();
  return block;
}

bool fits(int place, size_t size) {
  return limits[place] < 0 || totals[place].reserved + static_cast<int64_t>(size) <= limits[place];
}

void* take(size_t nbytes, int64_t pool, int place, int home, size_t size) {
  if (nbytes == 0) return nullptr;
  Block* block = nullptr;
  for (bool last : {false, true}) {
    ask_for_held_back();
    std::unique_lock held(world());
    take_back();
    block = from_kept({pool, place, home, size});
    Memory& total = totals[place];
    if (!block && fits(place, size)) {
      if (pool == 0) refuse_while_capturing("memory is made outside of the graph's pool");
      block = make(size, place, home);
      block->pool = pool;
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
    if (last || any_capture()) break;
    empty_cache();  // Rule 4
  }
  if (place == kPinned) TORCH_CHECK(false, "simdev: out of pinned memory, asked for ", nbytes, " bytes");
  TORCH_CHECK_WITH(OutOfMemoryError, false, "simdev: out of memory on device ", place, ", asked for ", nbytes, " bytes");
}
}  // namespace

std::map<uintptr_t, Block*>& blocks() {
  static auto* all = new std::map<uintptr_t, Block*>;
  return *all;
}

Block* find(const void* data) {
  auto it = blocks().upper_bound(reinterpret_cast<uintptr_t>(data));
  if (it == blocks().begin()) return nullptr;
  Block* block = std::prev(it)->second;
  return static_cast<const char*>(data) < block->data + block->size ? block : nullptr;
}

namespace {
int64_t pool_of(const Stream& s) {
  std::lock_guard held(world());
  return s.capture ? s.capture->pool : 0;
}
}  // namespace

void* allocate(size_t nbytes, int device, Stream& home) {
  return take(nbytes, pool_of(home), device, home.id, (nbytes + kSmallest - 1) / kSmallest * kSmallest);
}

void* allocate_pinned(size_t nbytes) {
  // Of the graph's, too, where it is captured.
  return take(nbytes, pool_of(current_stream(current_device())), kPinned, kNoStream, std::max(kSmallest, std::bit_ceil(nbytes)));  // as CUDA's
}

void release(void* data) {
  if (!data) return;
  std::lock_guard held(world());
  auto it = blocks().find(reinterpret_cast<uintptr_t>(data));
  if (it == blocks().end()) return;
  Block* block = it->second;
  block->used = false;
  add_allocated(totals[block->place], -static_cast<int64_t>(block->size));
  if (block->pool == 0) check_freed(*block);
  std::erase_if(block->recorded, [&](int id) { return id == block->home; });
  if (block->recorded.empty()) return keep(block);
  totals[block->place].held++;
  // What a graph has used of pinned memory, each of its replays uses.
  if (block->pool && block->place == kPinned) return;
  (any_capture() ? deferred : held_back).push_back(block);
  if (!any_capture()) note_recorded(block);
}

void use_pool(int64_t pool) { pools[pool]++; }
void leave_pool(int64_t pool) {
  if (--pools[pool] == 0) pools.erase(pool);
}

void note_deferred() {
  for (Block* block : std::exchange(deferred, {})) {
    note_recorded(block);
    held_back.push_back(block);
  }
}

bool is_there(const void* data, const std::string& op) {
  Block* block = find(data);
  if (!block) report(op + " is replayed on memory that was given up since");
  return block;
}

void freed_in_replay(void* data, Stream& home) {
  Block* block = find(data);
  if (!block) return;
  check_freed(*block, home.clock, home.id);
  block->history.clear();
  home.tick();
  block->history.write = home.now("the last use of the memory");
  if (poisoning) home.push_silently([data, size = block->size] { memset(data, 0xFF, size); });
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
  if (stream.capture) return stream.capture->touch(data, write);
  Block* block = find(data);
  if (!block) return;
  if (!block->used && block->pool == 0) report(op + " on stream " + std::to_string(stream.id) + " uses a freed " + block->name());
  touch(block->history, write, stream.now(op), stream.clock, block->name());
  if (block->place == kPinned && checking()) open_for_host(block, allowed_to_host(*block));
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
  refuse_while_capturing("memory is given up");
  std::vector<std::shared_ptr<Event>> waited;
  {
    std::lock_guard held(world());
    for (Block* block : held_back) waited.insert(waited.end(), block->pending.begin(), block->pending.end());
    for (int id : users_of_kept()) waited.push_back(stream(id).record());
  }
  for (auto& event : waited) event->wait();
  std::lock_guard held(world());
  take_back();
  for (auto& [key, list] : kept) {
    if (pools.count(std::get<0>(key))) continue;
    std::vector<Block*> busy;
    for (Block* block : list) {
      if (ahead_of_host(*block, true)) {  // freed meanwhile by another thread
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
