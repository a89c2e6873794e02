// What operators need of the device as torch knows it.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "memory.h"

namespace simdev {

constexpr auto kType = c10::DeviceType::PrivateUse1;

Stream& stream_of(const c10::Stream& s);
c10::Allocator* device_allocator();
void resize_bytes(const c10::Storage& storage, size_t nbytes);
void register_with_torch();

}  // namespace simdev
