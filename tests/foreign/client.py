#!/usr/bin/env python3
"""A client that shares no code with sdd: it learns every message from server reflection.

    client.py SOCKET generate PROMPT SEED OUT.png    streams a job's events, saves its picture
    client.py SOCKET submit PROMPT SEED OUT.png      submits, watches from the outside, saves the picture
    client.py SOCKET cancel PROMPT                   submits a long job, cancels it, prints its last event

Prints one line of JSON for people and tests. Needs grpcio, grpcio-reflection and protobuf."""
import json
import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

TERMINAL = ("succeeded", "failed", "cancelled")


class Foreign:
    def __init__(self, socket):
        # gRPC's Python library writes the socket's path into :authority, which servers rightly refuse; any name will do.
        options = [("grpc.default_authority", "localhost"), ("grpc.max_receive_message_length", 64 << 20)]
        self.channel = grpc.insecure_channel(f"unix:{socket}", options=options)
        database = ProtoReflectionDescriptorDatabase(self.channel)
        self.services = list(database.get_services())
        self.pool = DescriptorPool(database)
        self.generation = self.pool.FindServiceByName("sd.v1.Generation")

    def message(self, name, **fields):
        return GetMessageClass(self.pool.FindMessageTypeByName(f"sd.v1.{name}"))(**fields)

    def call(self, method, request):
        found = self.generation.methods_by_name[method]
        path = f"/sd.v1.Generation/{method}"
        answer = GetMessageClass(found.output_type).FromString
        kind = self.channel.unary_stream if found.server_streaming else self.channel.unary_unary
        return kind(path, request_serializer=lambda m: m.SerializeToString(), response_deserializer=answer)(
            request, timeout=300
        )

    def image(self, prompt, **more):
        return self.message("ImageRequest", prompt=prompt, **more)


def follow(events, out):
    """Reads events to the terminal one; says what they were and saves the picture."""
    kinds, sequences, last = [], [], None
    for response in events:
        event = response.event
        kind = event.WhichOneof("event")
        if not kinds or kinds[-1] != kind:
            kinds.append(kind)
        sequences.append(event.sequence)
        if kind == "image" and out:
            with open(out, "wb") as file:
                file.write(event.image.png)
        last = event
    assert sequences == list(range(1, len(sequences) + 1)), sequences
    assert sum(kind in TERMINAL for kind in kinds) == 1 and kinds[-1] in TERMINAL, kinds
    return kinds, last


def main():
    socket, verb, prompt = sys.argv[1:4]
    foreign = Foreign(socket)
    if verb == "generate":
        request = foreign.message("GenerateRequest", image=foreign.image(prompt, seed=int(sys.argv[4])))
        kinds, _ = follow(foreign.call("Generate", request), sys.argv[5])
        print(json.dumps({"kinds": kinds, "services": foreign.services}))
    elif verb == "submit":
        image = foreign.image(prompt, seed=int(sys.argv[4]))
        job = foreign.call("Submit", foreign.message("SubmitRequest", image=image)).job_id
        kinds, _ = follow(foreign.call("Watch", foreign.message("WatchRequest", job_id=job)), sys.argv[5])
        # Watching again, after the end, replays the same events.
        again, _ = follow(foreign.call("Watch", foreign.message("WatchRequest", job_id=job)), None)
        state = foreign.call("Get", foreign.message("GetRequest", job_id=job)).job.state
        print(json.dumps({"kinds": kinds, "again": again, "state": state}))
    elif verb == "cancel":
        image = foreign.image(prompt, steps=500)
        job = foreign.call("Submit", foreign.message("SubmitRequest", image=image)).job_id
        events = foreign.call("Watch", foreign.message("WatchRequest", job_id=job))
        for response in events:
            if response.event.WhichOneof("event") == "progress":
                break
        answer = foreign.call("Cancel", foreign.message("CancelRequest", job_id=job))
        rest = [response.event.WhichOneof("event") for response in events]
        print(json.dumps({"state": answer.job.state, "last": rest[-1]}))
    else:
        sys.exit(f"unknown verb {verb}")


if __name__ == "__main__":
    main()
