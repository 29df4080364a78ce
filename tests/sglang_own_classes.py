"""Run by the SGLang environment's interpreter: [[path, body], ...] on stdin, what its classes say of each on stdout."""

from __future__ import annotations

import dataclasses
import json
import sys


def main() -> None:
    from pydantic import TypeAdapter
    from sglang.srt.entrypoints.api_contract import generate_contract_error
    from sglang.srt.managers import io_struct as own

    classes = {
        "/generate": own.GenerateReqInput,
        "/abort_request": own.AbortReq,
        "/pause_generation": own.PauseGenerationReqInput,
        "/continue_generation": own.ContinueGenerationReqInput,
        "/update_weights_from_disk": own.UpdateWeightFromDiskReqInput,
        "/update_weight_version": own.UpdateWeightVersionReqInput,
        "/load_lora_adapter": own.LoadLoRAAdapterReqInput,
        "/unload_lora_adapter": own.UnloadLoRAAdapterReqInput,
        "/begin_weight_update": own.BeginWeightUpdateReqInput,
        "/end_weight_update": own.EndWeightUpdateReqInput,
        "/init_weights_update_group": own.InitWeightsUpdateGroupReqInput,
        "/update_weights_from_distributed": own.UpdateWeightsFromDistributedReqInput,
        "/destroy_weights_update_group": own.DestroyWeightsUpdateGroupReqInput,
    }
    said = []
    for path, body in json.load(sys.stdin):
        kind = classes[path]
        names = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else kind.__struct_fields__
        unknown = sorted(set(body) - set(names))
        try:
            TypeAdapter(kind).validate_python(body)
            error = generate_contract_error(body) if path == "/generate" else None
        except ValueError as problem:
            error = str(problem)
        said.append([path, unknown, error])
    print("SAID " + json.dumps(said))


if __name__ == "__main__":
    main()
