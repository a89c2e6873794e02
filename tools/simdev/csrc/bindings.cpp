// The face to Python; `simdev/` makes `torch.simdev` of it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "calls.h"
#include "collectives.h"
#include "generators.h"
#include "graphs.h"
#include "runtime.h"

namespace py = pybind11;
using namespace simdev;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_with_torch();
  m.attr("DEVICES") = kDevices;
  m.attr("PINNED") = kPinned;
  m.def("set_costs", [](double kernel_us, double copy_us, double copy_gbps, double host_us, bool jitter, bool virtual_time,
                        bool log, int queue_limit) {
    auto& c = costs();
    c.kernel_us = kernel_us, c.copy_us = copy_us, c.copy_gbps = copy_gbps, c.host_us = host_us;
    c.jitter = jitter, c.virtual_time = virtual_time, c.log = log, c.queue_limit = queue_limit;
  });
  m.def("set_comm_costs", [](double us, double gbps) { costs().comm_us = us, costs().comm_gbps = gbps; });
  m.def("make_group", make_group);
  py::class_<Graph>(m, "Graph")
      .def(py::init<>())
      .def("capture_begin", &Graph::capture_begin)
      .def("capture_end", &Graph::capture_end)
      .def("replay", &Graph::replay)
      .def("reset", &Graph::reset, py::call_guard<py::gil_scoped_release>())
      .def("pool", &Graph::pool);
  m.def("new_pool", new_pool);
  m.def("capturing", capturing);
  m.def("host_us", host_virtual_us);
  m.def("poison", poison);
  m.def("check_races", check_races);
  m.def("races", take_reports);
  m.def("timeline", [] {
    std::vector<std::tuple<int, std::string, double, double, double>> rows;
    for (auto& r : take_timeline()) rows.emplace_back(r.stream, r.name, r.queued, r.start, r.end);
    return rows;
  });
  m.def("waited_operators", waited_operators);
  m.def("close_gate", [](int64_t stream_id, int device) { (stream_id ? stream(stream_id) : default_stream(device)).close_gate(); });
  m.def("open_gates", open_gates);
  m.def("fail_later", fail_later);
  m.def("limit", limit);
  m.def("current_device", current_device);
  m.def("set_device", set_current_device);
  m.def("exchange_device", [](int d) {
    const int old = current_device();
    set_current_device(d);
    return old;
  });
  m.def("synchronize", synchronize_device);
  m.def("generator", [](int d) { return default_generator(d); });
  m.def("reset_peaks", reset_peaks);
  m.def("empty_cache", empty_cache);
  m.def("memory", [](int d) {
    const Memory x = memory(d);
    return std::map<std::string, int64_t>{
        {"allocated", x.allocated}, {"allocated_peak", x.allocated_peak}, {"active", x.active},
        {"active_peak", x.active_peak}, {"reserved", x.reserved}, {"reserved_peak", x.reserved_peak},
        {"requests", x.requests}, {"made", x.made}, {"held", x.held}};
  });
}
