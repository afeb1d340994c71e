"""Times torch for benches/ops.rs: a line of JSON names an operation and its shape, a line of JSON gives milliseconds."""

import json
import sys
import time

import torch
import torch.nn.functional as F

ACTIVATIONS = {
    "none": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def image(case, channels, layout):
    x = torch.randn(1, channels, case["side"], case["side"])
    return x.contiguous(memory_format=layout)


def variants(case):
    """Functions to time, by layout."""
    op = case["op"]
    layouts = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
    made = {}
    if op in ("conv", "upconv"):
        kernel, stride = case.get("kernel", 3), case.get("stride", 1)
        for name, layout in layouts.items():
            x = image(case, case["cin"], layout)
            conv = torch.nn.Conv2d(case["cin"], case["cout"], kernel, stride, kernel // 2).to(memory_format=layout)
            if op == "conv":
                made[name] = lambda x=x, conv=conv: conv(x)
            else:
                made[name] = lambda x=x, conv=conv: conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
    elif op == "group_norm":
        act = ACTIVATIONS[case["act"]]
        for name, layout in layouts.items():
            x = image(case, case["c"], layout)
            norm = torch.nn.GroupNorm(case["groups"], case["c"])
            made[name] = lambda x=x, norm=norm: act(norm(x))
    elif op == "concat":
        for name, layout in layouts.items():
            a, b = image(case, case["a"], layout), image(case, case["b"], layout)
            made[name] = lambda a=a, b=b: torch.cat([a, b], 1)
    elif op == "linear":
        x, linear, act = torch.randn(case["m"], case["k"]), torch.nn.Linear(case["k"], case["n"]), ACTIVATIONS[case["act"]]
        made["rows"] = lambda: act(linear(x))
    elif op == "linear_geglu":
        x, linear = torch.randn(case["m"], case["k"]), torch.nn.Linear(case["k"], case["n"])

        def linear_geglu():
            hidden, gate = linear(x).chunk(2, dim=-1)
            return hidden * F.gelu(gate)

        made["rows"] = linear_geglu
    elif op == "attention":
        def heads(tokens):
            return torch.randn(1, tokens, case["heads"], case["d"]).transpose(1, 2)

        q, k, v = heads(case["sq"]), heads(case["skv"]), heads(case["skv"])

        def attend():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=case["causal"])
            return out.transpose(1, 2).reshape(1, case["sq"], -1)

        made["rows"] = attend
    elif op == "layer_norm":
        x, norm = torch.randn(case["m"], case["c"]), torch.nn.LayerNorm(case["c"])
        made["rows"] = lambda: norm(x)
    elif op == "geglu":
        x = torch.randn(case["m"], 2 * case["c"])

        def geglu():
            hidden, gate = x.chunk(2, dim=-1)
            return hidden * F.gelu(gate)

        made["rows"] = geglu
    elif op == "silu":
        x = torch.randn(case["m"], case["c"])
        made["rows"] = lambda: F.silu(x)
    else:
        raise ValueError(f"unknown operation {op}")
    return made


def fastest(run, seconds, clock):
    begin, best, runs = time.perf_counter(), float("inf"), 0
    while runs < 3 or time.perf_counter() - begin < seconds:
        start = clock()
        run()
        best = min(best, clock() - start)
        runs += 1
    return best * 1e3


def main():
    torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    with torch.inference_mode():
        for line in sys.stdin:
            case = json.loads(line)
            clock = time.thread_time if case["cpu"] else time.perf_counter
            times = {name: fastest(run, case["seconds"], clock) for name, run in variants(case).items()}
            print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
