// The schemas of the twin's ops, which run the CUDA glue and kernels on CPU tensors. They are those of shardops/ops, in
// a namespace of their own beside the CPU implementations.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(shardops_twin, library) {
  library.def("flatten_shard(Tensor(a!) out, Tensor[] tensors, Tensor segments, float? scale=None) -> ()");
  library.def("unflatten_shard(Tensor buffer, Tensor(a!)[] out_tensors, Tensor segments, float? scale=None) -> ()");
  library.def(
      "copy_as_planned(Tensor(a!) buffer, Tensor(b!)[] tensors, Tensor segments, int geometry, bool into_buffer) -> "
      "bool");
  library.def("cast_gather(Tensor(a!) out, Tensor[] shards) -> ()");
  library.def("grad_norm(Tensor[] grads, float norm_type) -> (Tensor, Tensor)");
  library.def(
      "sharded_adam(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] masters, Tensor(f!)[] shadows, Tensor(h!)[] block_words, "
      "Tensor(g!) steps, Tensor? step_index, Tensor? dither, int rounding, float lr, float beta1, float beta2, "
      "float eps, float weight_decay, bool decoupled_weight_decay, bool maximize, Tensor? lr_tensor, "
      "Tensor? clip_coef, Tensor? grad_scale, Tensor? found_inf) -> ()");
}
