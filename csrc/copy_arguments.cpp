// The checks of the copies' arguments, and the hash by which a cached plan is known to fit.
#include "copy_arguments.h"

#include "op_helpers.h"

namespace shardops {
namespace {

// Of 64-bit words, in order. Each is mixed by the finaliser of MurmurHash3 (Appleby, public domain): a product alone,
// as FNV-1a takes it, never brings a difference in a word's upper bits to the lower ones.
class Hash {
 public:
  void add(int64_t word) {
    value_ = (value_ ^ static_cast<uint64_t>(word)) + 0x9E3779B97F4A7C15u;
    value_ = (value_ ^ (value_ >> 33)) * 0xFF51AFD7ED558CCDu;
    value_ = (value_ ^ (value_ >> 33)) * 0xC4CEB9FE1A85EC53u;
    value_ ^= value_ >> 33;
  }
  int64_t value() const { return static_cast<int64_t>(value_); }

 private:
  uint64_t value_ = 0;
};

Array array_of(const Device& device, const TensorView& tensor, const char* name, size_t index) {
  check_device(device, tensor, name, index);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, "[", index, "] is not contiguous");
  return Array{tensor.data_ptr(), tensor.numel(), to_dtype(tensor, name)};
}

std::vector<Array> arrays_of(const Device& device, const TensorList& tensors, const char* name) {
  std::vector<Array> arrays;
  arrays.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) arrays.push_back(array_of(device, tensors[i], name, i));
  return arrays;
}

std::vector<Segment> read_segments(const Tensor& table, const std::vector<Array>& arrays, int64_t buffer_numel) {
  STD_TORCH_CHECK(table.is_cpu() && table.is_contiguous() && table.scalar_type() == ScalarType::Long &&
                      table.dim() == 2 && table.size(1) == 4,
                  "segments must be a contiguous int64 tensor of shape [n, 4] on the CPU");
  const auto* rows = data<const Segment>(table);
  std::vector<Segment> segments(rows, rows + table.size(0));
  for (const Segment& s : segments) {
    // Differences, since a sum of two numbers near 2^63 would pass as a negative one.
    STD_TORCH_CHECK(s.tensor >= -1 && s.tensor < static_cast<int64_t>(arrays.size()) && s.numel >= 0 &&
                        s.buffer_offset >= 0 && s.numel <= buffer_numel - s.buffer_offset && s.tensor_offset >= 0 &&
                        (s.tensor < 0 || s.numel <= arrays[s.tensor].numel - s.tensor_offset),
                    "a segment reaches outside its tensor or the buffer: tensor ", s.tensor, ", offset ",
                    s.tensor_offset, ", buffer offset ", s.buffer_offset, ", numel ", s.numel);
  }
  return segments;
}

// What the kernels' __restrict promises; torch's own copies refuse the same.
void check_apart(const Array& buffer, const std::vector<Array>& arrays) {
  const char* begin = buffer.at(0);
  const char* end = buffer.at(buffer.numel);
  for (size_t i = 0; i < arrays.size(); ++i) {
    const bool apart = arrays[i].at(0) >= end || arrays[i].at(arrays[i].numel) <= begin;
    STD_TORCH_CHECK(apart || arrays[i].numel == 0 || buffer.numel == 0, "tensor ", i,
                    " shares memory with the flat buffer; clone one of the two");
  }
}

}  // namespace

CopyPlan plan_copy(const Device& device, const Tensor& buffer, const char* buffer_name, const TensorList& tensors,
                   const char* tensors_name, const Tensor& segments) {
  CopyPlan plan{array_of(device, buffer, buffer_name, 0), arrays_of(device, tensors, tensors_name), {}};
  plan.segments = read_segments(segments, plan.arrays, plan.buffer.numel);
  check_apart(plan.buffer, plan.arrays);
  return plan;
}

CopyPlan plan_gather(const Device& device, const Tensor& out, const TensorList& shards) {
  CopyPlan plan{array_of(device, out, "out", 0), arrays_of(device, shards, "shards"), {}};
  plan.segments.reserve(plan.arrays.size());
  int64_t offset = 0;
  for (size_t i = 0; i < plan.arrays.size(); ++i) {
    plan.segments.push_back(Segment{static_cast<int64_t>(i), 0, offset, plan.arrays[i].numel});
    offset += plan.arrays[i].numel;
  }
  STD_TORCH_CHECK(offset == plan.buffer.numel, "out has ", plan.buffer.numel, " elements, the shards have ", offset);
  check_apart(plan.buffer, plan.arrays);
  return plan;
}

int64_t geometry_of(const std::vector<TensorView>& tensors) {
  Hash hash;
  for (const TensorView& tensor : tensors) {
    const int64_t dim = tensor.dim();
    const bool is_strided = tensor.is_strided();
    hash.add(dim * 2 + is_strided);
    hash.add((int64_t{tensor.device_type()} << 40) ^ (int64_t{tensor.device_index()} << 8) ^ tensor.dtype_code());
    for (int64_t d = 0; d < dim; ++d) hash.add(tensor.sizes()[d]);
    for (int64_t d = 0; d < dim && is_strided; ++d) hash.add(tensor.strides()[d]);
  }
  return hash.value();
}

int64_t geometry_of(const Tensor& buffer, const TensorList& tensors) {
  std::vector<TensorView> views{buffer};
  views.insert(views.end(), tensors.views().begin(), tensors.views().end());
  return geometry_of(views);
}

}  // namespace shardops
