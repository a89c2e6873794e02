// Collectives of a process group, as tasks of a stream.
//
// Rule 1. All collectives of a group on one device run in order on one stream of its own, which
//         waits for the stream that is current where one is started. The host waits for nothing.
// Rule 2. `wait` makes the current stream wait, and lets go of the tensors. Until then the work
//         holds them; what is dropped without a wait is recorded on the group's stream.
// Rule 3. Bytes travel through another backend, on the host, inside of the task. A rank that is
//         missing lets the task hang until that backend's timeout; then it fails, and the host is
//         told the next time it waits for the device.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simdev {

c10::intrusive_ptr<c10d::Backend> make_group(const c10::intrusive_ptr<c10d::Backend>& carrier, int rank, int size);

}  // namespace simdev
