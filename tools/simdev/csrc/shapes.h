// What shapes an operator's results have, from its meta kernel, remembered by its arguments.
//
// Many meta kernels are written in Python and take a hundred times as long as the kernel itself.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

namespace simdev {

struct Shape {
  bool defined = false;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype = c10::ScalarType::Float;
};

struct Result {  // one of an operator's results: a tensor, or a list of tensors
  bool is_list = false;
  std::vector<Shape> shapes;
};

struct Outcome {
  std::vector<Result> results;  // of arguments that are written to: without shapes
  bool known = true;            // whether the meta kernel could say
};

std::optional<std::string> key_of(const std::string& name, const std::vector<c10::IValue>& arguments);
std::optional<Outcome> remembered(const std::string& key);
void remember(const std::string& key, const Outcome& outcome);

}  // namespace simdev
