"""AdamW's betas are torch's own, whatever the config says."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import settings

BUG = Bug(
    what="AdamW's betas not those of the config",
    where="hard-coded betas: OpenNMT-py PR 386, MaxText PR 17 (0.999 where 0.95 trains without spikes)",
    stage="trajectory",
    apply=lambda: settings(betas=(0.9, 0.999)),
)
