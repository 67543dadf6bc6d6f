// The host-side Python module: what the library was built with and which instruction sets this CPU runs.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/capability.h"

#ifndef SHARDOPS_BUILD_INFO
#error "setup.py gives SHARDOPS_BUILD_INFO, a JSON text"
#endif

PYBIND11_MODULE(_host, module) {
  module.def("build_info", [] { return std::string(SHARDOPS_BUILD_INFO); });
  module.def("cpu_capabilities", &shardops::supported_cpu_capabilities);
  module.def("cpu_capability",
             [] { return shardops::supported_cpu_capabilities()[shardops::chosen_cpu_capability()]; });
}
