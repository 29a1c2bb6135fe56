"""What a packer counts, as `ucxx_statistics` and the metrics show it."""

from __future__ import annotations

import msgspec

from transport.client.payload import ClientStatistics


class PackerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since `setup_ucxx_packer`."""

    batches: int
    consumed: int
    duplicates: int  # received a second time and dropped
    failed: int  # tickets whose payload could not be read
    stale: int  # of those: the payload was no longer in its slot
    returned: int  # claims given back to the queue
    lost_claims: int  # another trainer had the claim by the time of the ack; not trained on
    client: ClientStatistics
