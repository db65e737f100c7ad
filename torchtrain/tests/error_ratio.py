"""The error rule for torch's tensors."""

from torch import Tensor

from anchorline.tolerance import judge


def error_ratio(candidate: Tensor, truth: Tensor, reference: Tensor, dtype: object) -> float:
    """Return the candidate's error over what the error rule allows: up to 1 passes; infinite if not finite.

    candidate: the result under test, any shape, on any device.
    truth: the same quantity, computed in a wider dtype.
    reference: the same quantity with the candidate's permitted roundings.
    dtype: the torch dtype that the candidate computes in.
    """
    arrays = (x.detach().cpu().double().numpy() for x in (candidate, truth, reference))
    verdict = judge(*arrays, dtype=str(dtype).removeprefix("torch."))
    return verdict.ratio if verdict.allowance < float("inf") else float("inf")
