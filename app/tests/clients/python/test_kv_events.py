"""pyzmq, with libzmq: KV events and their replay, as vLLM's example of a subscriber reads them."""

import socket
import unittest

import msgpack
import openai
import zmq
import zmq.utils.monitor

import server

END = (-1).to_bytes(8, "big", signed=True)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class KvEvents(unittest.TestCase):
    def setUp(self):
        self.endpoint, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        arguments = ["--kv-events", self.endpoint, "--kv-events-replay", self.replay]
        address = server.start(*arguments)
        self.client = openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0)
        self.context = zmq.Context()
        self.addCleanup(self.context.destroy, 0)

    def socket(self, kind, endpoint, **options):
        new = self.context.socket(kind)
        new.setsockopt(zmq.RCVTIMEO, 60_000)
        for name, value in options.items():
            new.setsockopt(getattr(zmq, name), value)
        new.connect(endpoint)
        return new

    def answer(self, text):
        messages = [{"role": "user", "content": text * 40}]
        self.client.chat.completions.create(model=server.MODEL, messages=messages, max_tokens=2)

    def wait(self, monitor, event):
        while zmq.utils.monitor.recv_monitor_message(monitor)["event"] != event:
            pass

    def test_events_and_replay(self):
        topic = f"kv@127.0.0.1@{server.MODEL}".encode()
        subscriber = self.context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.RCVTIMEO, 60_000)
        subscriber.setsockopt(zmq.HEARTBEAT_IVL, 50)
        subscriber.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
        subscriber.subscribe(b"kv@other")
        subscriber.subscribe(topic)
        subscriber.unsubscribe(b"kv@other")
        monitor = subscriber.get_monitor_socket()
        subscriber.connect(self.endpoint)
        self.wait(monitor, zmq.EVENT_HANDSHAKE_SUCCEEDED)
        seen = {}
        # The first events may be earlier than the subscription.
        for number in range(100):
            self.answer(f"fox {number} ")
            if subscriber.poll(1000):
                break
        while subscriber.poll(1000):
            name, sequence, batch = subscriber.recv_multipart()
            self.assertEqual(name, topic)
            seen[sequence] = batch
        self.assertTrue(seen)
        time, events, rank = msgpack.unpackb(list(seen.values())[-1])
        self.assertEqual((type(time), rank), (float, 0))
        event = events[-1]
        self.assertEqual((event["type"], event["medium"]), ("BlockStored", "GPU"))
        self.assertEqual(len(event["token_ids"]), len(event["block_hashes"]) * event["block_size"])

        # REQ reads the first answer alone.
        for kind, prefix in [(zmq.DEALER, [b""]), (zmq.REQ, [])]:
            client = self.socket(kind, self.replay, HEARTBEAT_IVL=50, HEARTBEAT_TIMEOUT=20_000)
            client.send_multipart([*prefix, (0).to_bytes(8, "big")])
            *empty, first, sequence, batch = client.recv_multipart()
            self.assertEqual((empty, first, sequence), (prefix, b"kv@127.0.0.1@", bytes(8)))
            self.assertEqual(msgpack.unpackb(batch)[1], [{"type": "AllBlocksCleared"}])
            if kind == zmq.REQ:
                continue
            replayed = {}
            while sequence != END:
                replayed[sequence] = batch
                _, of, sequence, batch = client.recv_multipart()
                self.assertIn(of, [topic, b""])
            self.assertEqual((of, batch), (b"", b""))
            self.assertEqual({number: replayed[number] for number in seen}, seen)
            self.assertEqual(sorted(replayed), [number.to_bytes(8, "big") for number in range(len(replayed))])
        correlating = self.socket(zmq.REQ, self.replay, REQ_CORRELATE=1)
        correlating.send((0).to_bytes(8, "big"))
        self.assertEqual(correlating.recv_multipart()[1], bytes(8))

    def test_sockets_of_other_kinds_are_refused(self):
        wrong = [(zmq.REQ, self.endpoint, {}), (zmq.SUB, self.replay, {}), (zmq.PUSH, self.replay, {})]
        secret = {"PLAIN_USERNAME": b"fox", "PLAIN_PASSWORD": b"owl"}
        for kind, endpoint, options in [*wrong, (zmq.SUB, self.endpoint, secret)]:
            client = self.context.socket(kind)
            monitor = client.get_monitor_socket()
            for name, value in options.items():
                client.setsockopt(getattr(zmq, name), value)
            client.connect(endpoint)
            events = []
            while zmq.EVENT_DISCONNECTED not in events:
                events.append(zmq.utils.monitor.recv_monitor_message(monitor)["event"])
            self.assertNotIn(zmq.EVENT_HANDSHAKE_SUCCEEDED, events, kind)
            client.disable_monitor()
            client.close(0)


if __name__ == "__main__":
    unittest.main()
