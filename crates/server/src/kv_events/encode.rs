//! Batches of events in MessagePack, arrays in the order of vLLM's fields.

use std::time::{SystemTime, UNIX_EPOCH};

use paguro_engine::{KvEvent, Medium};

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// Returns a batch of one event: all blocks are gone.
pub fn cleared() -> Vec<u8> {
    let mut out = Vec::new();
    write(&mut out, |out| {
        rmp::encode::write_array_len(out, 2)?;
        rmp::encode::write_f64(out, now())?;
        rmp::encode::write_array_len(out, 1)?;
        rmp::encode::write_array_len(out, 1)?;
        rmp::encode::write_str(out, "AllBlocksCleared")
    });
    out
}

/// Returns a batch: its time and its events.
pub fn encode(events: &[KvEvent]) -> Vec<u8> {
    let mut out = Vec::new();
    write(&mut out, |out| {
        rmp::encode::write_array_len(out, 2)?;
        rmp::encode::write_f64(out, now())?;
        rmp::encode::write_array_len(out, events.len() as u32)?;
        events.iter().try_for_each(|event| encode_event(out, event))
    });
    out
}

type Written = Result<(), rmp::encode::ValueWriteError>;

/// Writes to memory, which does not fail.
fn write(out: &mut Vec<u8>, encode: impl FnOnce(&mut Vec<u8>) -> Written) {
    if let Err(error) = encode(out) {
        tracing::error!(%error, "KV events");
    }
}

fn encode_event(out: &mut Vec<u8>, event: &KvEvent) -> Written {
    match event {
        KvEvent::Stored { hashes, parent, tokens, block_size, medium } => {
            rmp::encode::write_array_len(out, 7)?;
            rmp::encode::write_str(out, "BlockStored")?;
            encode_numbers(out, hashes.iter().copied())?;
            match parent {
                Some(parent) => drop(rmp::encode::write_uint(out, *parent)?),
                None => nil(out)?,
            }
            encode_numbers(out, tokens.iter().map(|&token| token.into()))?;
            rmp::encode::write_uint(out, *block_size as u64)?;
            // No adapter.
            nil(out)?;
            rmp::encode::write_str(out, name(*medium))
        }
        KvEvent::Removed { hashes, medium } => {
            rmp::encode::write_array_len(out, 3)?;
            rmp::encode::write_str(out, "BlockRemoved")?;
            encode_numbers(out, hashes.iter().copied())?;
            rmp::encode::write_str(out, name(*medium))
        }
    }
}

fn nil(out: &mut Vec<u8>) -> Written {
    rmp::encode::write_nil(out).map_err(rmp::encode::ValueWriteError::InvalidMarkerWrite)
}

fn encode_numbers(out: &mut Vec<u8>, numbers: impl ExactSizeIterator<Item = u64>) -> Written {
    rmp::encode::write_array_len(out, numbers.len() as u32)?;
    numbers.into_iter().try_for_each(|number| rmp::encode::write_uint(out, number).map(drop))
}

/// vLLM's name of a medium. Pages of a device are `GPU`, also on a CPU: routers know these three.
fn name(medium: Medium) -> &'static str {
    match medium {
        Medium::Device => "GPU",
        Medium::Host => "CPU",
        Medium::Disk => "DISK",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(hash: u64) -> KvEvent {
        KvEvent::Stored {
            hashes: vec![hash],
            parent: None,
            tokens: vec![1, 300],
            block_size: 2,
            medium: Medium::Device,
        }
    }

    #[test]
    fn events_are_arrays_in_the_order_of_vllm() {
        let removed = KvEvent::Removed { hashes: vec![7], medium: Medium::Disk };
        let bytes = encode(&[stored(9), removed]);
        assert_eq!(&bytes[..2], [0x92, 0xcb], "an array of the time and the events");
        let mut expected = vec![0x92, 0x97, 0xab];
        expected.extend(b"BlockStored");
        expected.extend([0x91, 9, 0xc0, 0x92, 1, 0xcd, 1, 44, 2, 0xc0, 0xa3]);
        expected.extend(b"GPU");
        expected.extend([0x93, 0xac]);
        expected.extend(b"BlockRemoved");
        expected.extend([0x91, 7, 0xa4]);
        expected.extend(b"DISK");
        assert_eq!(&bytes[10..], expected);
        assert_eq!(&cleared()[10..], [&[0x91, 0x91, 0xb0], &b"AllBlocksCleared"[..]].concat());
    }
}
