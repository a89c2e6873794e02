// Memory of the devices and pinned memory of the host, handed out and taken back by CUDA's rules.
//
// Rule 1. A block belongs to the stream that was current when it was made. Freed, it can be handed
//         out on that stream at once, for the stream runs in order; so whoever used it on another
//         stream must have had its own stream wait, or have told the allocator (`record_stream`).
// Rule 2. A block that other streams were recorded on is held back until the host sees that their
//         work up to the moment it was freed is done.
// Rule 3. Pinned blocks belong to no stream; each stream that copies is recorded by the copy.
// Rule 4. What is freed is kept for requests of the same size. It is given up, after a wait for
//         everything, when a limit would be passed; beyond that, memory is out.
// Rule 5. The host may read pinned memory once it knows that the last copy to it is done, and write
//         once it knows all copies done. Otherwise it is reported; a block is looked at as a whole.
#pragma once

#include <cstddef>
#include <string>

#include "streams.h"

namespace simdev {

constexpr int kPinned = kDevices;  // stands for a device where pinned memory is meant

struct Memory {  // bytes
  int64_t allocated = 0;  // in use
  int64_t active = 0;     // and held back, Rule 2
  int64_t reserved = 0;   // and kept for later requests, Rule 4
  int64_t allocated_peak = 0, active_peak = 0, reserved_peak = 0;
  // Counts: blocks asked for, those that were not there yet, and those held back when freed.
  int64_t requests = 0, made = 0, held = 0;
};

void* allocate(size_t nbytes, int device, Stream& home);
void* allocate_pinned(size_t nbytes);
void release(void* data);
void record(const void* data, Stream& stream);
bool is_pinned(const void* data);
int device_of(const void* data);

// For graphs, see graphs.h, Rule 6. Hold world.
void use_pool(int64_t pool);    // one graph more has it
void leave_pool(int64_t pool);  // without graphs it is given up as other memory is
void note_deferred();           // no capture is underway any more
// Whether a replay finds what it captured; reports it if not.
bool is_there(const void* data, const std::string& op);
void freed_in_replay(void* data, Stream& home);

// Notes that the operation the stream has just queued reads or writes a block. Hold world.
void touch(const void* data, bool write, Stream& stream, const std::string& op);

void* device_view(const void* data);    // where devices read and write what the host has at `data`
void host_learns(const Clock& clock);   // the host knows all of this to be done

Memory memory(int device);
void reset_peaks(int device);
void empty_cache();
void limit(int device, int64_t reserved_bytes);  // negative: none
void poison(bool on);

}  // namespace simdev
