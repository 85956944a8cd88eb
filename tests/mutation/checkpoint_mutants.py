"""Mutants of ``mfsdp_compile/checkpoint/``: what is saved, what is removed, what is trusted."""

from __future__ import annotations

from .mutant import Mutant

RUNS = "checkpoint/test_checkpoint_runs.py -k"
STRANGERS = "checkpoint/test_strangers.py -k"
HOSTILE = "checkpoint/test_hostile.py -k"
PLACE = "mfsdp_compile/checkpoint"

PRETRAINED = "integrations/test_pretrained.py -k"

CHECKPOINT = (
    Mutant(
        "mfsdp_compile/pretrained.py",
        "weights of the folder that a save replaced come back",
        " and not any(fnmatch.fnmatchcase(left.name, pattern) for pattern in _WEIGHTS)",
        "",
        (f"{PRETRAINED} saves_that_fail",),
    ),
    Mutant(
        "runtime/eager/save_methods.py",
        "a module writes its shards if it is given its state dict",
        "written = state.values() if isinstance(state, Mapping) else self.parameters()",
        "written = [] if isinstance(state, Mapping) else self.parameters()",
        (f"{PRETRAINED} own_method",),
    ),
    Mutant(
        f"{PLACE}/megatron_states.py",
        "settings and steps of mapped groups are those of the first group",
        "        if name in self.settings:",
        "        if False:",
        ("checkpoint/test_convert.py -k states_and_settings",),
    ),
    Mutant(
        f"{PLACE}/loading.py",
        "a run forgets what a run before it could not load",
        "sharded.lineage.take_up((manifest.run, *manifest.continues), manifest.refused)",
        "sharded.lineage.take_up((manifest.run, *manifest.continues), {})",
        (f"{RUNS} passed_over",),
    ),
    Mutant(
        f"{PLACE}/saving.py",
        "a save in the background writes what training changes",
        'return tensor.to("cpu", copy=True)',
        'return tensor.to("cpu")',
        (f"{RUNS} what_is_saved_is",),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "a lower step that is saved later is not the last",
        "serial = complete[-1][0].serial + 1 if complete else 0",
        "serial = len(complete)",
        (f"{RUNS} lower_step",),
    ),
    Mutant(
        f"{PLACE}/manifest.py",
        "a manifest that was changed is believed",
        "        if digest != _digest(found):",
        "        if False:",
        (f"{STRANGERS} manifest_that_was_changed",),
    ),
    Mutant(
        f"{PLACE}/manifest.py",
        "manifests of other formats are read",
        '"format")) != FORMAT:',
        '"format")) == -5:',
        (f"{STRANGERS} other_formats",),
    ),
    Mutant(
        f"{PLACE}/manifest.py",
        "files are hashed up to their first block",
        "_map_in_threads(block, range(0, size, BLOCK_BYTES))",
        "_map_in_threads(block, range(0, min(size, BLOCK_BYTES), BLOCK_BYTES))",
        (f"{STRANGERS} digests_of_files",),
    ),
    Mutant(
        f"{PLACE}/manifest.py",
        "a file's digest does not know the order of blocks",
        "        whole_file.update(digest)",
        "        whole_file.update(bytes(32))",
        (f"{STRANGERS} digests_of_files",),
    ),
    Mutant(
        f"{PLACE}/manifest.py",
        "files of the right length are right",
        "            right = size == files[name].bytes and hash_file(path) == files[name]",
        "            right = size == files[name].bytes",
        ("checkpoint/test_checkpoint.py -k flipped_byte",),
    ),
    Mutant(
        f"{PLACE}/manifest.py",
        "names in a manifest lead anywhere",
        "        child(directory, name)\n",
        "",
        (f"{STRANGERS} manifest",),
    ),
    Mutant(
        f"{PLACE}/manifest.py",
        "entries that a manifest lacks are no matter",
        "    if odd := sorted(set(found) ^ {each.name for each in fields(Manifest)}):",
        "    if odd := sorted(set(found) - {each.name for each in fields(Manifest)}):",
        (f"{STRANGERS} manifests_that_make_no_sense",),
    ),
    Mutant(
        f"{PLACE}/manifest.py",
        "a manifest has its name before it is on the disk",
        "        os.fsync(file.fileno())\n",
        "",
        (f"{RUNS} before_they_have",),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "the folder's new name may be lost with the power",
        "                sync_directory(self.root)\n",
        "",
        (f"{RUNS} before_they_have",),
    ),
    Mutant(
        f"{PLACE}/saving.py",
        "the names of files may be lost with the power",
        "        sync_directory(self._directory)\n",
        "",
        (f"{RUNS} before_they_have",),
    ),
    Mutant(
        f"{PLACE}/saving.py",
        "files on the disk of another machine are not missed",
        "        self._check_arrived(files)\n",
        "",
        ("checkpoint/test_checkpoint_corners.py -k do_not_see_one_folder",),
    ),
    Mutant(
        f"{PLACE}/saving.py",
        ".metadata is not in the manifest",
        '            files[".metadata"] = hash_file(self._directory / ".metadata")\n',
        "",
        ("checkpoint/test_checkpoint.py -k flipped_byte", "checkpoint/test_checkpoint_files.py -k changed_byte"),
    ),
    Mutant(
        f"{PLACE}/load_plan.py",
        "a cast of the optimizer's state is not told",
        'self._differs("cast", f"optimizer.{owner}.{state}", f"{dtype} there, {param.dtype} here")',
        "pass",
        (f"{RUNS} another_dtype",),
    ),
    Mutant(
        f"{PLACE}/loading.py",
        "microbatches before a load count after it",
        "        sharded.grad_sync.microbatches = 0\n",
        "",
        (f"{RUNS} microbatches_that_wait",),
    ),
    Mutant(
        f"{PLACE}/loading.py",
        "after a load, ranks compute with the weights before",
        "        sharded.refresh()\n",
        "",
        (f"{HOSTILE} residents",),
    ),
    Mutant(
        f"{PLACE}/loading.py",
        "generators go on at another number of ranks",
        "and manifest.world_size == ranks",
        "",
        (f"{HOSTILE} another_number",),
    ),
    Mutant(
        f"{PLACE}/loading.py",
        "weights change before all ranks have read their part",
        "        self._read(self._plan.in_place, only_checks=True)\n",
        "        self._read(self._plan.in_place)\n",
        (f"{HOSTILE} error_on_one_rank",),
    ),
    Mutant(
        f"{PLACE}/loading.py",
        "one rank keeps the new optimizer state, and others the old",
        "            vars(self._optimizer).update(self._before)\n",
        "            pass\n",
        (f"{HOSTILE} error_on_one_rank",),
    ),
    Mutant(
        f"{PLACE}/dcp_reader.py",
        "chunks may overlap, or lie outside of their tensor",
        "    return not any(signs.values())",
        "    return math.prod(shape) == sum(math.prod(chunk.sizes) for chunk in chunks)",
        (f"{HOSTILE} was_not_saved",),
    ),
    Mutant(
        f"{PLACE}/extra_state.py",
        "a generator reads beyond its words",
        "    if not 0 <= position <= WORDS:",
        "    if not 0 <= position:",
        (f"{HOSTILE} was_not_saved",),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "a load does not wait for the save in progress",
        """PATIENCE):
            self.wait()
        found:""",
        """PATIENCE):
            pass
        found:""",
        ("checkpoint/test_checkpoint_corners.py -k waits_for_the_save",),
    ),
    Mutant(
        f"{PLACE}/saving.py",
        "a file of another rank that is cut short has arrived",
        "if size != files[name].bytes)",
        "if size < 0)",
        ("checkpoint/test_checkpoint_corners.py -k cut_short_has_not",),
    ),
    Mutant(
        f"{PLACE}/full_state_dict.py",
        "a full state dict has the live buffers",
        "            state.update(copies.add(name, value))",
        "            pass",
        ("checkpoint/test_ignored_params.py -k is_a_copy",),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "checkpoints of other jobs are removed",
        "self._find()[0] if lineage.has(manifest.run)]",
        "self._find()[0]]",
        (f"{RUNS} two_jobs",),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "the last name is written when old checkpoints are gone",
        "                    write_durably(self.root / _LATEST, final.name)\n"
        "                    self._remove_old(sharded.lineage)\n",
        "                    self._remove_old(sharded.lineage)\n"
        "                    write_durably(self.root / _LATEST, final.name)\n",
        ("checkpoint/test_crash.py -k killed",),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "one more is kept than asked for",
        "        for path in own[: -self.keep]:",
        "        for path in own[: -self.keep - 1]:",
        (f"{RUNS} two_jobs", "checkpoint/test_checkpoint.py -k folder_of_checkpoints"),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "two processes save into one folder",
        "                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                break",
        "                break",
        ("checkpoint/test_checkpoint.py -k never_released",),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "a save in progress is taken for the remains of a dead one",
        "not left.is_dir() or not _is_locked(left)",
        "not left.is_dir() or True",
        ("checkpoint/test_checkpoint.py -k two_jobs_save",),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "a forked process keeps the lock",
        "            fcntl.flock(file, fcntl.LOCK_UN)",
        "            pass",
        ("checkpoint/test_checkpoint_corners.py -k forked",),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "gradients that wait are lost by a save",
        "            if waiting := sharded.grad_sync.microbatches:",
        "            if waiting := 0:",
        ("checkpoint/test_checkpoint.py -k gradients_that_wait",),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "an error of the first rank leaves the others waiting",
        "            except Exception as error:  # the other ranks wait for it\n                lock.close()",
        "            except ZeroDivisionError as error:\n                lock.close()",
        ("checkpoint/test_checkpoint.py -k 'fails or two_processes'",),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "half a checkpoint that failed keeps the disk full",
        "                remove(self.directory)",
        "                pass",
        (f"{RUNS} disk_that_is_full",),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "a step of the same number takes the place of the one before",
        "n for n in names if not (self.root / n).exists() and not",
        "n for n in names if not",
        (f"{RUNS} 'lower_step or takes_the_folder'", "checkpoint/test_checkpoint.py -k folder_of_checkpoints"),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "what is not sharded is written by every rank",
        "            if not is_first:",
        "            if False:",
        ("checkpoint/test_checkpoint.py -k first_ranks",),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "each rank goes on with the first one's random numbers",
        '            state["rng"] = {str(dist.get_rank(sharded.everyone)): get_generators()}',
        '            state["rng"] = {"0": get_generators()}',
        ("checkpoint/test_checkpoint.py -k random_numbers",),
    ),
    Mutant(
        f"{PLACE}/folder.py",
        "a damaged last checkpoint is passed over in silence",
        "                    if path.name == name:",
        "                    if False:",
        ("checkpoint/test_checkpoint.py -k folder_of_checkpoints", "checkpoint/test_checkpoint_corners.py -k manifest"),
    ),
    Mutant(
        "mfsdp_compile/checkpoint/folder.py",
        "a rank that leaves a save lets the others wait",
        "            watchdog.abandon(group, error)",
        "            pass",
        ("ranks/test_fault_table.py -k some_of_the_table",),
    ),
    Mutant(
        "mfsdp_compile/checkpoint/load_plan.py",
        "a part of an optimizer's state may be missing",
        "                    if entry not in entries:",
        "                    if False:",
        ("checkpoint/test_hostile.py -k start_over",),
    ),
)
