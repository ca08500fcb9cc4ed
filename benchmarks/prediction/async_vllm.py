"""vLLM's command line with asynchronous scheduling on a CPU, where vLLM turns it off.

python async_vllm.py serve MODEL --async-scheduling ...
"""

from __future__ import annotations

import sys
from typing import Any


def keep_async_scheduling() -> None:
    """Put back what the platform's check of the configuration turns off."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_keep(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = staticmethod(check_and_keep)


if __name__ == "__main__":
    keep_async_scheduling()
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
