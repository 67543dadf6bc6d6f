// Which instruction sets the CPU kernels may use here. Compiled into the op library, which dispatches on it, and into
// the host module, which reports it.
#pragma once

#include <string>
#include <vector>

namespace shardops {

// Names of the instruction sets that were compiled in and that this CPU runs, from "default" to the best.
std::vector<std::string> supported_cpu_capabilities();

// Position in that list of the one to use: the last, or the one that SHARDOPS_CPU_CAPABILITY names.
// Throws std::runtime_error when that variable names one that is unknown or beyond this CPU.
int chosen_cpu_capability();

}  // namespace shardops
