// What the host may do with pinned memory, memory.h's Rule 5.
#include "blocks.h"

namespace simdev {
namespace {
std::set<Block*> guarded;  // whose host's view is not all open; hold world

Views views_of(const Block& block) { return {block.data, block.for_devices}; }

}  // namespace

const Access* ahead_of_host(const Block& block, bool writing) {
  const auto& [write, reads] = block.history;
  if (!covers(host_clock(), write)) return &write;
  if (writing)
    for (const auto& [_, read] : reads)
      if (!covers(host_clock(), read)) return &read;
  return nullptr;
}

void open_for_host(Block* block, Open open) {
  if (block->open == open) return;
  block->open = open;
  open_host_view(views_of(*block), block->size, open);
  if (open == Open::kAll)
    guarded.erase(block);
  else
    guarded.insert(block);
}

Open allowed_to_host(const Block& block) {
  if (ahead_of_host(block, false)) return Open::kNothing;
  return ahead_of_host(block, true) ? Open::kReading : Open::kAll;
}

void close_no_more(Block* block) { guarded.erase(block); }

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

}  // namespace simdev
