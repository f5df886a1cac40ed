"""A client that gets to a stage of a request, says so, and waits to be killed: victim.py PORT STAGE."""

import json
import socket
import sys
import time

STAGES = ("connected", "mid headers", "mid body", "waiting", "streaming", "answered")


def main():
    port, stage = int(sys.argv[1]), sys.argv[2]
    connection = socket.create_connection(("127.0.0.1", port))
    is_short = stage == "answered"
    body = json.dumps({"prompt": "victim " * 20, "max_tokens": 4 if is_short else 2000, "ignore_eos": True,
                       "n": 2, "stream": stage == "streaming"})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    message = (head + "\r\n" + body).encode()
    sent = {"connected": 0, "mid headers": len(head) // 2, "mid body": len(message) - 20}.get(stage, len(message))
    connection.sendall(message[:sent])
    if stage == "streaming":
        received = b""
        while received.count(b"data: ") < 3:
            received += connection.recv(4096)
    elif stage == "answered":
        received = b""
        while b"usage" not in received:
            received += connection.recv(65536)
    print("ready", flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main()
