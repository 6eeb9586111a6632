"""One text for each kind of secret that people leave in configs and logs, and what of it must never be shown."""

import base64

_RANDOM = "q7Zp3Wd9Xk2Lm5Nb8Vc4"
PLANTED = {
    "Hugging Face": ("hf_" + _RANDOM * 2, _RANDOM),
    "NVIDIA": ("nvapi-" + _RANDOM * 3, _RANDOM),
    "GitHub": ("ghp_" + _RANDOM * 2, _RANDOM),
    "GitHub, fine-grained": ("github_pat_" + _RANDOM * 4, _RANDOM),
    "AWS access key": ("AKIA" + "Q7ZP3WD9XK2LM5NB", "Q7ZP3WD9"),
    "AWS secret key by its name": ("aws_secret_access_key = " + f"q7Zp/Wd9+{_RANDOM}{_RANDOM}"[:40], "q7Zp/Wd9"),
    "Slack": ("xoxb-" + "123456789012-" + _RANDOM, _RANDOM),
    "an API key": ("sk-proj-" + _RANDOM * 2, _RANDOM),
    "GitLab": ("glpat-" + _RANDOM, _RANDOM),
    "a private key": (f"-----BEGIN RSA PRIVATE KEY----- {_RANDOM} {_RANDOM} -----END RSA PRIVATE KEY-----", _RANDOM),
    "a JSON web token": (f"eyJhbGciOiJIUzI1NiJ9.eyJ{_RANDOM}.{_RANDOM}", _RANDOM),
    "a password in an address": (f"http://me:{_RANDOM}@proxy.example.org:3128/", _RANDOM),
    "Docker's credentials": (f'"auth": "{base64.b64encode(f"me:{_RANDOM}".encode()).decode()}"', "bWU6cTdacDNXZDl"),
    "a key by its name": (f"NGC_API_KEY={_RANDOM}", _RANDOM),
}
"""Text, and the part of it that is secret."""
HARMLESS = (
    "sha256:417cbf33f87b5378849df37983552cd1f8bc8b62fe1ceabe004de816a55dff21",
    "nvcr.io/nvidia/pytorch@sha256:417cbf33f87b5378849df37983552cd1f8bc8b62fe1ceabe004de816a55dff21",
    "0123456789abcdef0123456789abcdef",
    "commit 073d7450a1b2c3d4e5f60718293a4b5c6d7e8f90",
    '"nonce": "c9f0f895fb98ab9159f51fd0297e236d"',
    "/lustre/fsw/me/hf_cache/models--meta-llama--Llama-2-70b-hf/snapshots/3aba440b59558f995867ba6e1f58f21d0336b5bb",
    "export HF_TOKEN=$HF_TOKEN HF_TOKEN_PATH=/home/me/token",
    '"key": "submission_benchmark", "value": "llama2_70b_lora"',
    "TOKENIZERS_PARALLELISM=false eos_token: <|end_of_text|> num_tokens=12345678",
    "wandb_api_key: null, password: ********, secret: ${oc.env:SECRET}",
    "https://user@host.example.org:8443/a/b:c@d",
    "-----BEGIN CERTIFICATE-----",
    "auth: required, auth=none, author=abcdefghijkl",
    "the risk-free-parameter-of-the-schedule, disk-usage-of-every-node-at-the-end, task-sk-1",
    "UNSET_KEY= and MY_PASSWORD=$FROM_VAULT",
)
"""What only looks like one."""
