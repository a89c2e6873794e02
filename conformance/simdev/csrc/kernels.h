// Operators of the device that have no file of their own.
#pragma once

#include <set>
#include <string>

namespace simdev {

std::set<std::string> waited_operators();  // those the host had to wait for

}  // namespace simdev
