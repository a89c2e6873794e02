// One call of an operator: the CPU's kernel, run on the stream's thread over the device's memory.
//
// Shapes come from the operator's meta kernel, so the host goes on at once. Where there is none, or
// random numbers are drawn (their order is the host's), the host waits for the result; such
// operators are listed by `waited_operators`.
#pragma once

#include <torch/library.h>

#include <set>
#include <string>

namespace simdev {

using Stack = torch::jit::Stack;

// Takes the arguments from the stack and puts the results there. `runs_as` is the operator whose
// meta and CPU kernels are run, with the same arguments.
void run_call(const c10::OperatorHandle& op, const c10::OperatorHandle& runs_as, Stack* stack);

std::set<std::string> waited_operators();  // those the host had to wait for

}  // namespace simdev
