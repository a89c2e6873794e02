// Memory with two views: a device uses one, and the host's can be closed, so that the host is seen
// when it reads what was not yet copied or writes what is still read, however it does so.
#pragma once

#include <cstddef>

namespace simdev {

struct Views {
  char *host, *device;
};
enum class Open { kNothing, kReading, kAll };

Views map_twice(size_t nbytes);  // aligned to pages
void unmap(const Views& views, size_t nbytes);
void open_host_view(const Views& views, size_t nbytes, Open open);

// Called where the host touches a view that is closed; false: the address is not in one. What the
// host does goes on afterwards, so the view has to be open then.
bool host_touches(const void* address);

}  // namespace simdev
