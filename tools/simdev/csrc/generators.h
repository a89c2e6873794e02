// Random numbers: those of a CPU generator, and in a graph those that each replay draws anew.
//
// While a device captures, its default generator counts what is drawn instead of drawing it, and its
// state is that count. A replay takes one number from the generator, and from it and the count comes
// what each kernel draws: so setting the state back in a capture repeats numbers in each replay.
#pragma once

#include <ATen/core/Generator.h>

namespace simdev {

const at::Generator& default_generator(int device);  // negative: of the current device
at::Generator new_generator(int device);
at::Generator cpu_generator_of(const at::Generator& g);

void begin_captured_numbers(int device);
bool end_captured_numbers(int device);  // whether any were drawn
uint64_t draw_seed(int device);
// The count of what is drawn next by a kernel that is captured.
uint64_t next_captured(const at::Generator& g);
void seed_captured(at::Generator& cpu, uint64_t seed, uint64_t count);  // in a replay

}  // namespace simdev
