"""Run train_text.py with FSDP, as configs/accelerate/fsdp2.yaml does, on two gloo processes.

accelerate refuses FSDP without GPUs, so its state is set by hand.
"""

import contextlib
import os

from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule


def sharding(make, policy, folder):
    """Return a `make_accelerator` that sets up FSDP as accelerate does on GPUs.

    `prepare` of its accelerator writes the number of sharded modules to folder/units.
    """

    def make_sharded(*args, **kwargs):
        accelerator = make(*args, **kwargs)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy=policy, reshard_after_forward=True, state_dict_type="SHARDED_STATE_DICT",
            cpu_ram_efficient_loading=False,
        )  # fmt: skip
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        prepare = accelerator.prepare

        def counted(*objects):
            prepared = prepare(*objects)
            units = [m for m in prepared[0].modules() if isinstance(m, FSDPModule)]
            (folder / "units").write_text(str(len(units)))
            return prepared

        accelerator.prepare = counted
        return accelerator

    return make_sharded


def run(rank, argv, folder, policy):
    """Call train_text.main as one of two processes; standard error goes to folder/stderr.RANK."""
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    from moh_vision.engine import run_setup
    from moh_vision.language import train as train_text

    run_setup.make_accelerator = sharding(run_setup.make_accelerator, policy, folder)
    with open(folder / f"stderr.{rank}", "w") as file, contextlib.redirect_stderr(file):
        train_text.main(argv)
