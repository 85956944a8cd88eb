"""Mutants of mixed precision: dtypes of parameters, and casts at the borders of modules."""

from __future__ import annotations

from .mutant import Mutant

_TESTS = "runtime/test_param_dtype.py"

PRECISION = (
    Mutant(
        "runtime/formats/casts.py",
        "outputs are not cast",
        "    return result if casts.outputs is None else cast_tensors(result, casts.outputs)",
        "    return result",
        (f"{_TESTS} -k 'recomputation or float16_in'",),
    ),
    Mutant(
        "runtime/formats/casts.py",
        "keyword arguments are not cast",
        "cast_tensors(args, casts.inputs), cast_tensors(kwargs, casts.inputs)",
        "cast_tensors(args, casts.inputs), kwargs",
        (f"{_TESTS} -k 'structures and eager and not aot'",),
    ),
    Mutant(
        "runtime/formats/casts.py",
        "integers are cast",
        "value.is_floating_point() and value.dtype != dtype",
        "value.dtype != dtype",
        (f"{_TESTS} -k structures_are_cast",),
    ),
    Mutant(
        "runtime/plan/precision.py",
        "inputs are cast although the policy says not to",
        "Casts(self.param_dtype if self.cast_forward_inputs else None, self.output_dtype)",
        "Casts(self.param_dtype, self.output_dtype)",
        (f"{_TESTS} -k 'from_elsewhere or float16_in'",),
    ),
    Mutant(
        "runtime/plan/precision.py",
        "FSDP2's policy makes float32 shards of a bfloat16 model",
        "                main_params_dtype=None,\n",
        "",
        (f"{_TESTS} -k dtypes_of_shards",),
    ),
    Mutant(
        "runtime/plan/precision.py",
        "the dtype of shards is taken from that of gathers",
        "            return self.main_dtype(model_dtype)\n        return self.grad_comm",
        "            return compute_dtype\n        return self.grad_comm",
        (f"{_TESTS} -k default_of_fsdp2s",),
    ),
    Mutant(
        "runtime/plan/precision_plan.py",
        "the base class's policy wins over that of the class",
        "for key in (module, *type(module).__mro__) if key in own",
        "for key in (module, *reversed(type(module).__mro__)) if key in own",
        (f"{_TESTS} -k most_derived",),
    ),
    Mutant(
        "runtime/plan/precision_plan.py",
        "parameters inside a module with a policy of its own have the default",
        '                position = positions[model.get_submodule(name.rpartition(".")[0])]',
        "                position = 0",
        (f"{_TESTS} -k float16_in",),
    ),
    Mutant(
        "runtime/plan/precision_plan.py",
        "tied parameters of different policies are gathered in one of the dtypes",
        "            if self.policy_at(position) != self.policy_at(first[1]):",
        "            if False:",
        (f"{_TESTS} -k several_policies_are_refused",),
    ),
    Mutant(
        "runtime/init/meta.py",
        "parameters on the meta device are rounded to the dtype that they compute in",
        "dtype=plan.model_dtype, device=self._device",
        "dtype=plan.compute_dtype, device=self._device",
        (f"{_TESTS} -k initialization_in_full",),
    ),
    Mutant(
        "runtime/plan/model_plan.py",
        "ranks do not compare their casts",
        "        lines += [*map(_bucket, self.buckets), *self.precision.describe()]\n",
        "        lines += map(_bucket, self.buckets)\n",
        (f"{_TESTS} -k agree_on_policies",),
    ),
)
