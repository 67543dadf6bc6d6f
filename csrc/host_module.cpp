// The host-side Python module: what the library was built with, which instruction sets this CPU runs, and a loop over
// all states that each step makes before its launch: in Python it costs more than the step of a small tensor.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/capability.h"

#ifndef SHARDOPS_BUILD_INFO
#error "setup.py gives SHARDOPS_BUILD_INFO, a JSON text"
#endif

namespace py = pybind11;

namespace {

// Whether each dict holds the very objects that its snapshot holds, and no others.
bool same_items(const py::list& dicts, const py::list& snapshots) {
  const Py_ssize_t size = PyList_GET_SIZE(dicts.ptr());
  if (size != PyList_GET_SIZE(snapshots.ptr())) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* dict = PyList_GET_ITEM(dicts.ptr(), i);
    PyObject* snapshot = PyList_GET_ITEM(snapshots.ptr(), i);
    if (PyDict_GET_SIZE(dict) != PyDict_GET_SIZE(snapshot)) return false;
    PyObject *key, *value;
    for (Py_ssize_t position = 0; PyDict_Next(snapshot, &position, &key, &value);) {
      if (PyDict_GetItemWithError(dict, key) != value) {
        if (PyErr_Occurred()) throw py::error_already_set();
        return false;
      }
    }
  }
  return true;
}

}  // namespace

PYBIND11_MODULE(_host, module) {
  module.def("build_info", [] { return std::string(SHARDOPS_BUILD_INFO); });
  module.def("cpu_capabilities", &shardops::supported_cpu_capabilities);
  module.def("cpu_capability",
             [] { return shardops::supported_cpu_capabilities()[shardops::chosen_cpu_capability()]; });
  module.def("same_items", &same_items);
}
