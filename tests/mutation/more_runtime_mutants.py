"""Of ``runtime/``: optimizers, the order of what ranks do, parameters that are divided already."""

from __future__ import annotations

from .mutant import Mutant

MUON = ("test_optimizer.py -k muon",)
STATE = ("test_optimizer.py -k 'state or keeps_groups'",)
ORDER = ("test_order.py",)

MORE_RUNTIME = (
    # -- Muon ---------------------------------------------------------------------------------------------------------
    Mutant(
        "runtime/muon.py",
        "Nesterov momentum is plain momentum",
        'gradient.lerp(buffer, momentum) if group["nesterov"] else buffer',
        "buffer",
        MUON,
    ),
    Mutant(
        "runtime/muon.py",
        "plain momentum is Nesterov's",
        'gradient.lerp(buffer, momentum) if group["nesterov"] else buffer',
        "gradient.lerp(buffer, momentum)",
        MUON,
    ),
    Mutant(
        "runtime/muon.py",
        "weights do not decay",
        '                param.mul_(1 - lr * group["weight_decay"])\n',
        "",
        MUON,
    ),
    Mutant(
        "runtime/muon.py",
        "the learning rate is not adjusted to the shape",
        'compat.muon_learning_rate(lr, group["adjust_lr_fn"], param.shape)',
        "lr",
        MUON,
    ),
    Mutant(
        "runtime/muon.py",
        "with outer ranks matrices go to owners of other pieces",
        "        {k: piece % outer.size for k, piece in owner.items()},",
        "        {k: piece // inner.size for k, piece in owner.items()},",
        ("test_optimizer.py -k shares_out",),
    ),
    Mutant(
        "runtime/muon.py",
        "with outer ranks the second way is that of the first",
        "        {k: owner[k] // outer.size for k in here},",
        "        {k: owner[k] % inner.size for k in here},",
        ("test_optimizer.py -k shares_out",),
    ),
    Mutant(
        "runtime/muon.py",
        "an inner rank counts the elements of the first one",
        "    mine = inner.rank * outer.size\n",
        "    mine = 0\n",
        ("test_optimizer.py -k test_muon",),
    ),
    Mutant(
        "runtime/muon.py",
        "matrices that one rank has are worked on elsewhere",
        "        if home is not None:",
        "        if False:",
        ("test_optimizer.py -k shares_out",),
    ),
    Mutant(
        "runtime/muon.py",
        "one rank works on all matrices",
        "            load[found[i]] += work[i]\n    return found",
        "    return found",
        ("test_optimizer.py -k shares_out",),
    ),
    Mutant(
        "runtime/muon.py",
        "momentum of the last step is lost",
        "            buffer.lerp_(gradient, 1 - momentum)",
        "            buffer = gradient * (1 - momentum)",
        MUON,
    ),
    # -- state of optimizers ------------------------------------------------------------------------------------------
    Mutant(
        "runtime/optimizer_state.py",
        "state is loaded by position, not by name",
        '    state = {number[name]: held for name, held in state_dict["state"].items()}',
        '    state = dict(enumerate(state_dict["state"].values()))',
        (*STATE, "test_checkpoint.py -k optimizer_state_by_name"),
    ),
    Mutant(
        "runtime/optimizer_state.py",
        "one number is cut like the parameter that is one number",
        "    return shape == param.shape and key not in _NUMBERS",
        "    return shape == param.shape",
        ("test_optimizer.py -k test_state_before_the_first_step_is_what_that_step_begins_with",),
    ),
    Mutant(
        "runtime/optimizer_state.py",
        "parameters of several groups take the settings of one",
        "        if len(sources) > 1:",
        "        if False:",
        (
            "test_checkpoint.py -k optimizer_state_by_name",
            "test_optimizer.py -k refuses",
            "test_checkpoint_corners.py -k group",
        ),
    ),
    Mutant(
        "runtime/optimizer_state.py",
        "NAdam begins with a product of 0",
        '    "mu_product": lambda group: 1,',
        '    "mu_product": lambda group: 0,',
        ("test_optimizer.py -k test_state_before_the_first_step_is_what_that_step_begins_with",),
    ),
    Mutant(
        "runtime/optimizer_state.py",
        "missing parameters are left as they are",
        "    if missing or unexpected:",
        "    if unexpected:",
        ("test_optimizer.py -k other_parameters_are_refused",),
    ),
    Mutant(
        "runtime/optimizer_state.py",
        "loaded state shares the memory of the state dict",
        "RowShardedTensor.wrap(rows.to(param.to_local().device, copy=True), param.split",
        "RowShardedTensor.wrap(rows.to(param.to_local().device), param.split",
        ("test_optimizer.py -k loaded_state",),
    ),
    Mutant(
        "runtime/optimizer_state.py",
        "two models may share names in one optimizer",
        "    if len(set(names)) < len(names):",
        "    if False:",
        ("test_optimizer.py -k same_names",),
    ),
    # -- order --------------------------------------------------------------------------------------------------------
    Mutant(
        "runtime/order.py",
        "a fork is not asked for when it is known",
        "        if collective not in here.collectives or len(here.collectives) > 1 or here.phases:",
        "        if collective not in here.collectives:",
        ("test_order.py -k test_a_fork_is_asked_for_every_time",),
    ),
    Mutant(
        "runtime/order.py",
        "what has stalled goes on",
        "        if self.stalled is not None:\n            raise standstill(self.stalled)\n        here = self._at",
        "        here = self._at",
        ("test_order.py -k standstill",),
    ),
    Mutant(
        "runtime/order.py",
        "a rank that comes later to an epoch meets those before it",
        "        self.epoch, self.events = self.epoch + 1, 0",
        "        self.events = 0",
        ("test_order.py -k restart",),
    ),
    Mutant(
        "runtime/order.py",
        "after a failure ranks stand where they were",
        "        self._at, self._phase, self._before, self._forward, self._past = self._start, None, None, None, ((), 0)\n        self._recent = ()",
        "        self._recent = ()",
        ("test_order.py -k restart",),
    ),
    Mutant(
        "runtime/order.py",
        "what is expected of one row of forwards is expected after all",
        "        return self.last_after.get(past, self.last)",
        "        return self.last",
        ("test_order.py -k test_what_follows_what_is_agreed_on_once",),
    ),
    Mutant(
        "runtime/order.py",
        "operations at rest are usual where they never were",
        "        is_alone = len(here.collectives) == 1 and all(phase.kind == AT_REST for phase in here.phases)",
        "        is_alone = True",
        ("test_order.py -k fork",),
    ),
    # -- parameters that are divided already --------------------------------------------------------------------------
    Mutant(
        "runtime/partition.py",
        "a negative partition_dim is refused",
        "not -param.ndim <= dim < param.ndim:",
        "not 0 <= dim < param.ndim:",
        ("test_tensor_parallel.py -k marks_name",),
    ),
    Mutant(
        "runtime/partition.py",
        "a negative partition_dim stays negative",
        "        dim %= param.ndim\n",
        "",
        ("test_tensor_parallel.py -k marks_name",),
    ),
    Mutant(
        "runtime/partition.py",
        "a partition_dim beyond the dimensions is taken",
        "not -param.ndim <= dim < param.ndim:",
        "not -param.ndim <= dim <= param.ndim:",
        ("test_tensor_parallel.py -k marks_name",),
    ),
    Mutant(
        "runtime/partition.py",
        "parts with a stride pass for parts in one piece",
        "        if stride != 1:",
        "        if False:",
        ("test_tensor_parallel.py -k test_mistakes_with_meshes",),
    ),
    Mutant(
        "runtime/partition.py",
        "marks without a mesh are ignored",
        '        if mesh is None:\n            raise ValueError(\n                f"Parameter {name!r} is marked tensor_model_parallel: it is a part',
        '        if mesh is None:\n            return None\n            raise ValueError(\n                f"Parameter {name!r} is marked tensor_model_parallel: it is a part',
        ("test_tensor_parallel.py -k test_mistakes_with_meshes",),
    ),
    Mutant(
        "runtime/partition.py",
        "meshes of the same ranks pass for the same mesh",
        "            and self.mesh is other.mesh\n",
        "            and self.mesh == other.mesh\n",
        ("test_tensor_parallel.py -k mesh_that_is_gone",),
    ),
    Mutant(
        "runtime/partition.py",
        "parts of the whole are taken from its beginning",
        "                whole = whole.narrow(dim, self.offsets[missing + dim], part)",
        "                whole = whole.narrow(dim, 0, part)",
        ("test_tensor_parallel.py -k test_parameters_at_rest",),
    ),
    Mutant(
        "runtime/partition.py",
        "a norm counts other ranks' experts as copies",
        "    def count(self) -> int:\n        return self.mesh.size()",
        "    def count(self) -> int:\n        return 1",
        ("test_expert_parallel.py -k test_experts_that_are_modules",),
    ),
    Mutant(
        "runtime/partition.py",
        "partial sums pass for parameters",
        "        if odd:",
        "        if False:",
        ("test_tensor_parallel.py -k test_mistakes_with_meshes",),
    ),
    Mutant(
        "runtime/partition.py",
        "a parameter may be sharded twice over one dimension",
        "        if shared := mine & set(mesh.mesh_dim_names or ()):",
        "        if shared := set():",
        ("test_tensor_parallel.py -k test_mistakes_with_meshes",),
    ),
)
