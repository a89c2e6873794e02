// A block of memory, as the files that hand it out and that watch the host see it.
#pragma once

#include <map>
#include <set>
#include <string>

#include "memory.h"
#include "views.h"

namespace simdev {

struct Block {
  char* data;
  size_t size;
  int place, home;  // device or kPinned; stream or kNoStream
  char* for_devices = nullptr;  // where `data` is the host's view
  Open open = Open::kAll;       // what the host may do, Rule 5
  bool used = true;
  int64_t pool = 0;  // of a graph; 0: none
  std::set<int> recorded;
  History history;
  std::vector<std::shared_ptr<Event>> pending;

  std::string name() const {
    return (place == kPinned ? "pinned" : "device") + std::string(" block of ") + std::to_string(size) + " bytes" +
           (home == kNoStream ? "" : " of stream " + std::to_string(home));
  }
};

// All of these: hold world.
std::map<uintptr_t, Block*>& blocks();  // by address, those kept for later too
Block* find(const void* data);          // that an address is in; nullptr: none
// The first access that the host would have to wait for; nullptr where there is none.
const Access* ahead_of_host(const Block& block, bool writing);
void open_for_host(Block* block, Open open);
Open allowed_to_host(const Block& block);
void close_no_more(Block* block);  // it is about to go

}  // namespace simdev
