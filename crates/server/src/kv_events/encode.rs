//! Batches of events in MessagePack, as vLLM sends them.
//!
//! A batch is the array `[time, events, rank]`. Each event is a map with the names of vLLM's fields, or, for readers of older
//! versions, an array in the order of these fields.

use std::time::{SystemTime, UNIX_EPOCH};

use paguro_engine::{ExtraKey, KvEvent, Medium};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::generate::salt_parts;

/// Maximum number of events in a batch: routers refuse larger ones.
pub const MOST_EVENTS: usize = 4096;

/// Form of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KvEncoding {
    /// Maps with names, since vLLM 0.24.
    #[default]
    Map,
    /// Arrays in the order of the fields, up to vLLM 0.23.
    Array,
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// Returns a batch of one event: all blocks are gone.
pub fn cleared(encoding: KvEncoding) -> Vec<u8> {
    batch(1, |fields, ()| fields.begin(encoding, "AllBlocksCleared", 0), [()])
}

/// Returns batches of these events, each with the time.
pub fn encode(encoding: KvEncoding, events: &[KvEvent]) -> impl Iterator<Item = Vec<u8>> {
    events
        .chunks(MOST_EVENTS)
        .map(move |events| batch(events.len(), |fields, event| encode_event(fields, encoding, event), events))
}

type Written = Result<(), rmp::encode::ValueWriteError>;

fn batch<T>(
    count: usize,
    mut encode: impl FnMut(&mut Fields, T) -> Written,
    events: impl IntoIterator<Item = T>,
) -> Vec<u8> {
    let mut fields = Fields::default();
    let written = (|| {
        rmp::encode::write_array_len(&mut fields.out, 3)?;
        rmp::encode::write_f64(&mut fields.out, now())?;
        rmp::encode::write_array_len(&mut fields.out, count as u32)?;
        events.into_iter().try_for_each(|event| encode(&mut fields, event))?;
        // There is one rank: each server publishes its own events.
        fields.number(0)
    })();
    // Writing to memory does not fail.
    if let Err(error) = written {
        tracing::error!(%error, "KV events");
    }
    fields.out
}

/// Writer of the fields of an event.
#[derive(Default)]
struct Fields {
    out: Vec<u8>,
    named: bool,
}

impl Fields {
    /// Begins an event of this type with `count` fields.
    fn begin(&mut self, encoding: KvEncoding, kind: &str, count: u32) -> Written {
        self.named = encoding == KvEncoding::Map;
        if self.named {
            rmp::encode::write_map_len(&mut self.out, count + 1)?;
            rmp::encode::write_str(&mut self.out, "type")?;
        } else {
            rmp::encode::write_array_len(&mut self.out, count + 1)?;
        }
        self.text(kind)
    }

    /// Begins a field, whose value follows.
    fn field(&mut self, name: &str) -> Result<&mut Self, rmp::encode::ValueWriteError> {
        if self.named {
            rmp::encode::write_str(&mut self.out, name)?;
        }
        Ok(self)
    }

    fn text(&mut self, text: &str) -> Written {
        rmp::encode::write_str(&mut self.out, text)
    }

    fn nil(&mut self) -> Written {
        rmp::encode::write_nil(&mut self.out).map_err(rmp::encode::ValueWriteError::InvalidMarkerWrite)
    }

    fn number(&mut self, number: u64) -> Written {
        rmp::encode::write_uint(&mut self.out, number).map(drop)
    }

    fn list<T>(
        &mut self,
        items: impl ExactSizeIterator<Item = T>,
        mut write: impl FnMut(&mut Self, T) -> Written,
    ) -> Written {
        rmp::encode::write_array_len(&mut self.out, items.len() as u32)?;
        items.into_iter().try_for_each(|item| write(self, item))
    }
}

fn encode_event(fields: &mut Fields, encoding: KvEncoding, event: &KvEvent) -> Written {
    match event {
        KvEvent::Stored { hashes, parent, tokens, extra, block_size, window, medium } => {
            fields.begin(encoding, "BlockStored", if window.is_some() { 11 } else { 10 })?;
            fields.field("block_hashes")?.list(hashes.iter(), |out, hash| out.number(*hash))?;
            match (fields.field("parent_block_hash")?, parent) {
                (field, Some(parent)) => field.number(*parent)?,
                (field, None) => field.nil()?,
            }
            fields.field("token_ids")?.list(tokens.iter(), |out, token| out.number((*token).into()))?;
            fields.field("block_size")?.number(*block_size as u64)?;
            // Names stand for adapters.
            fields.field("lora_id")?.nil()?;
            fields.field("medium")?.text(name(*medium))?;
            let adapter = extra.first().into_iter().flatten().find_map(|key| match key {
                ExtraKey::Adapter(name) => Some(name),
                ExtraKey::Salt(_) | ExtraKey::Picture { key: _, offset: _ } => None,
            });
            match (fields.field("lora_name")?, adapter) {
                (field, Some(name)) => field.text(name)?,
                (field, None) => field.nil()?,
            }
            encode_extra_keys(fields.field("extra_keys")?, extra, hashes.len())?;
            // One group of layers stands for all.
            fields.field("group_idx")?.number(0)?;
            match window {
                None => fields.field("kv_cache_spec_kind")?.text("full_attention"),
                Some(window) => {
                    fields.field("kv_cache_spec_kind")?.text("sliding_window")?;
                    fields.field("kv_cache_spec_sliding_window")?.number(*window as u64)
                }
            }
        }
        KvEvent::Removed { hashes, medium } => {
            fields.begin(encoding, "BlockRemoved", 3)?;
            fields.field("block_hashes")?.list(hashes.iter(), |out, hash| out.number(*hash))?;
            fields.field("medium")?.text(name(*medium))?;
            fields.field("group_idx")?.number(0)
        }
    }
}

/// Writes a list for each block that has other inputs than tokens, and nil for all others.
fn encode_extra_keys(fields: &mut Fields, extra: &[Vec<ExtraKey>], blocks: usize) -> Written {
    let of_block = (0..blocks).map(|block| extra.get(block).map(Vec::as_slice).unwrap_or_default());
    fields.list(of_block, |out, keys: &[ExtraKey]| {
        let values: Vec<ExtraValue> = keys.iter().flat_map(extra_values).collect();
        if values.is_empty() {
            return out.nil();
        }
        out.list(values.iter(), |out, value| match value {
            ExtraValue::Text(text) => out.text(text),
            ExtraValue::Placed(digest, offset) => {
                rmp::encode::write_array_len(&mut out.out, 2)?;
                out.text(digest)?;
                rmp::encode::write_sint(&mut out.out, *offset).map(drop)
            }
        })
    })
}

/// An element of `extra_keys`.
#[derive(Debug, PartialEq, Eq)]
enum ExtraValue {
    Text(String),
    /// Digest of a picture, and the place of its first token relative to the block's.
    Placed(String, i64),
}

/// Returns the values of an extra key: a salt of the client as it was sent, for the key of a client a digest of its id, and for a
/// picture its digest and place.
fn extra_values(key: &ExtraKey) -> Vec<ExtraValue> {
    match key {
        ExtraKey::Adapter(name) => vec![ExtraValue::Text(name.to_string())],
        ExtraKey::Salt(salt) => {
            let (key, own) = salt_parts(salt);
            let of_key = key.map(|key| format!("key:{}", hex(&Sha256::digest(key)[..8])));
            let own = own.map(|own| String::from_utf8_lossy(own).into_owned());
            of_key.into_iter().chain(own).map(ExtraValue::Text).collect()
        }
        ExtraKey::Picture { key, offset } => vec![ExtraValue::Placed(hex(key), *offset)],
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
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
    use std::sync::Arc;

    use crate::generate::Caller;

    use super::*;

    fn stored(extra: Vec<Vec<ExtraKey>>, window: Option<usize>) -> KvEvent {
        KvEvent::Stored {
            hashes: vec![9],
            parent: None,
            tokens: vec![1, 300],
            extra,
            block_size: 2,
            window,
            medium: Medium::Device,
        }
    }

    /// A text in MessagePack.
    fn text(text: &str) -> Vec<u8> {
        let mut out = Vec::new();
        rmp::encode::write_str(&mut out, text).unwrap();
        out
    }

    /// The fields of a stored block in the order of vLLM, with the bytes of their values.
    fn fields(extra: &[u8], kind: &str) -> Vec<(&'static str, Vec<u8>)> {
        vec![
            ("type", text("BlockStored")),
            ("block_hashes", vec![0x91, 9]),
            ("parent_block_hash", vec![0xc0]),
            ("token_ids", vec![0x92, 1, 0xcd, 1, 44]),
            ("block_size", vec![2]),
            ("lora_id", vec![0xc0]),
            ("medium", text("GPU")),
            ("lora_name", vec![0xc0]),
            ("extra_keys", extra.to_vec()),
            ("group_idx", vec![0]),
            ("kv_cache_spec_kind", text(kind)),
        ]
    }

    #[test]
    fn events_are_maps_or_arrays_in_the_order_of_vllm() {
        let removed = KvEvent::Removed { hashes: vec![7], medium: Medium::Disk };
        let removed_fields = [
            ("type", text("BlockRemoved")),
            ("block_hashes", vec![0x91, 7]),
            ("medium", text("DISK")),
            ("group_idx", vec![0]),
        ];
        for (encoding, head) in [(KvEncoding::Map, 0x80), (KvEncoding::Array, 0x90)] {
            let write = |fields: &[(&str, Vec<u8>)]| {
                let named = fields.iter().map(|(name, value)| match encoding {
                    KvEncoding::Map => [text(name), value.clone()].concat(),
                    KvEncoding::Array => value.clone(),
                });
                [vec![head | fields.len() as u8], named.collect::<Vec<_>>().concat()].concat()
            };
            let bytes = encode(encoding, &[stored(vec![vec![]], None), removed.clone()]).next().unwrap();
            assert_eq!(&bytes[..2], [0x93, 0xcb], "an array of the time, the events and the rank");
            let events = [write(&fields(&[0x91, 0xc0], "full_attention")), write(&removed_fields)].concat();
            assert_eq!(bytes[10..], [&[0x92], &events[..], &[0]].concat(), "{encoding:?}");
            let windowed = encode(encoding, &[stored(Vec::new(), Some(3))]).next().unwrap();
            let mut expected = fields(&[0x91, 0xc0], "sliding_window");
            expected.push(("kv_cache_spec_sliding_window", vec![3]));
            assert_eq!(windowed[10..], [&[0x91], &write(&expected)[..], &[0]].concat(), "{encoding:?}");
            let gone = write(&[("type", text("AllBlocksCleared"))]);
            assert_eq!(cleared(encoding)[10..], [&[0x91], &gone[..], &[0]].concat());
        }
    }

    #[test]
    fn a_salt_is_an_extra_key_and_the_id_of_a_key_is_not_shown() {
        let settings = crate::ServerSettings::for_tests();
        for (tenant, own, expected) in [
            (None, "blue", vec!["blue"]),
            (Some("owner"), "", vec!["key:4c1029697ee35871"]),
            (Some("owner"), "blue", vec!["key:4c1029697ee35871", "blue"]),
        ] {
            let caller = Caller { tenant: tenant.map(Arc::from), ..Caller::default() };
            let salt = caller.prefix_salt(&settings, own);
            let found = extra_values(&ExtraKey::Salt(salt.into()));
            let expected: Vec<_> = expected.into_iter().map(|text| ExtraValue::Text(text.into())).collect();
            assert_eq!(found, expected);
            assert!(!format!("{found:?}").contains("owner"));
        }
    }

    #[test]
    fn a_picture_is_an_extra_key_of_its_digest_and_place() {
        let salt = Caller::default().prefix_salt(&crate::ServerSettings::for_tests(), "blue");
        let salt = ExtraKey::Salt(salt.into());
        let picture = |key: u8, offset: i64| ExtraKey::Picture { key: [key; 32], offset };
        let event = stored(vec![vec![picture(0xab, 300), picture(1, -2), salt]], None);
        let batch = encode(KvEncoding::Map, &[event]).next().unwrap();
        let pairs = [("ab", &[0xcd, 1, 44][..]), ("01", &[0xfe])];
        let pairs = pairs.map(|(byte, offset)| [&[0x92], &text(&byte.repeat(32))[..], offset].concat());
        let expected = [&text("extra_keys")[..], &[0x91, 0x93], &pairs.concat(), &text("blue")].concat();
        assert!(batch.windows(expected.len()).any(|bytes| bytes == expected), "{batch:02x?}");
    }

    #[test]
    fn large_batches_are_split() {
        let removed = KvEvent::Removed { hashes: vec![7], medium: Medium::Disk };
        let events = vec![removed; 2 * MOST_EVENTS + 1];
        assert_eq!(encode(KvEncoding::Map, &events).count(), 3);
    }
}
