"""A trainer of vLLM's workers as a process of its own, with vLLM's own HTTP client. For tests/adapters/test_vllm.py.

Arguments as JSON: the server's URL, the class of in_modules that is trained, and fields of `Init`. Each line of its
input is a version, which it makes and sends; it answers with the same line, or ends with the error.
"""

from __future__ import annotations

import json
import sys
import warnings

warnings.simplefilter("ignore")

import in_modules  # noqa: E402
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory  # noqa: E402

from transport.adapters import vllm as adapter  # noqa: E402


def main() -> None:
    url, kind, fields = json.loads(sys.argv[1])
    adapter.register()
    model = getattr(in_modules, kind)()
    info = adapter.Init(rank=0, **fields)
    client = adapter.PausingHTTPClient(url)
    sender = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
    try:
        for line in sys.stdin:
            model.step(int(line))
            sender.send_weights()
            print(line, end="", flush=True)
    finally:
        sender.shutdown()


if __name__ == "__main__":
    main()
