//! The key/value part of a GGUF file.

use std::{collections::BTreeMap, fmt};

/// All key/values of a file, by key.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {
    entries: BTreeMap<String, Value>,
}

/// A value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the names say it all
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    /// A string that is not UTF-8.
    Bytes(Vec<u8>),
    Array(Array),
}

/// An array of values of one type. Arrays of arrays exist in the format, but no model uses them: they are refused.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the names say it all
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    Strings(Vec<String>),
    /// Strings of which at least one is not UTF-8: token pieces in old files are arbitrary bytes.
    ByteStrings(Vec<Vec<u8>>),
}

/// Does the same for each type of numbers of a [`Value`] or an [`Array`].
macro_rules! match_numbers {
    ($kind:ident, $value:expr, $inner:ident => $for_numbers:expr, { $($others:tt)* }) => {
        match $value {
            $kind::U8($inner) => $for_numbers,
            $kind::I8($inner) => $for_numbers,
            $kind::U16($inner) => $for_numbers,
            $kind::I16($inner) => $for_numbers,
            $kind::U32($inner) => $for_numbers,
            $kind::I32($inner) => $for_numbers,
            $kind::U64($inner) => $for_numbers,
            $kind::I64($inner) => $for_numbers,
            $kind::F32($inner) => $for_numbers,
            $kind::F64($inner) => $for_numbers,
            $($others)*
        }
    };
}
pub(super) use match_numbers;

/// Error of a value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetadataError {
    /// The key is not there.
    #[error("the metadata has no `{key}`")]
    Missing {
        /// The key.
        key: String,
    },
    /// The value has another type or is out of range.
    #[error("metadata `{key}` is {found}, expected {expected}")]
    WrongType {
        /// The key.
        key: String,
        /// Type in the file, and the value if it is short.
        found: String,
        /// Expected type.
        expected: &'static str,
    },
}

impl Metadata {
    /// Returns the value under `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key)
    }

    /// Returns all key/values in the order of their keys.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Adds a value; returns `false`, changing nothing, if the key is already there.
    pub fn insert(&mut self, key: String, value: Value) -> bool {
        match self.entries.entry(key) {
            std::collections::btree_map::Entry::Vacant(entry) => {
                entry.insert(value);
                true
            }
            std::collections::btree_map::Entry::Occupied(_) => false,
        }
    }

    /// Sets a value, in place of one that is there.
    pub fn set(&mut self, key: &str, value: Value) {
        self.entries.insert(key.to_owned(), value);
    }

    /// Removes a value.
    pub fn remove(&mut self, key: &str) {
        self.entries.remove(key);
    }

    /// Returns a string; `None` if absent, of another type or not UTF-8.
    pub fn str(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// Returns an integer of any type that fits; `None` otherwise.
    pub fn u32(&self, key: &str) -> Option<u32> {
        self.get(key)?.as_u64()?.try_into().ok()
    }

    /// Returns a float, or an integer that is one exactly; `None` otherwise.
    pub fn f32(&self, key: &str) -> Option<f32> {
        self.get(key)?.as_f32()
    }

    /// Returns a boolean; `None` otherwise.
    pub fn bool(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            Value::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// Returns an array of strings that are all UTF-8; see [`Metadata::byte_strings`] for others.
    pub fn strings(&self, key: &str) -> Option<&[String]> {
        match self.get(key)? {
            Value::Array(Array::Strings(strings)) => Some(strings),
            _ => None,
        }
    }

    /// Returns an array of strings as bytes, whether UTF-8 or not.
    pub fn byte_strings(&self, key: &str) -> Option<Vec<&[u8]>> {
        match self.get(key)? {
            Value::Array(Array::Strings(strings)) => Some(strings.iter().map(String::as_bytes).collect()),
            Value::Array(Array::ByteStrings(strings)) => Some(strings.iter().map(Vec::as_slice).collect()),
            _ => None,
        }
    }

    /// Returns an array of `f32`.
    pub fn f32s(&self, key: &str) -> Option<&[f32]> {
        match self.get(key)? {
            Value::Array(Array::F32(values)) => Some(values),
            _ => None,
        }
    }

    /// Returns an array of `i32`.
    pub fn i32s(&self, key: &str) -> Option<&[i32]> {
        match self.get(key)? {
            Value::Array(Array::I32(values)) => Some(values),
            _ => None,
        }
    }

    /// Returns an array of integers of any type, or of booleans, as `u32`; `None` also if one does not fit.
    pub fn u32s(&self, key: &str) -> Option<Vec<u32>> {
        fn convert<T: Copy + TryInto<u32>>(values: &[T]) -> Option<Vec<u32>> {
            values.iter().map(|&value| value.try_into().ok()).collect()
        }
        match self.get(key)? {
            Value::Array(array) => match array {
                Array::U8(values) => convert(values),
                Array::I8(values) => convert(values),
                Array::U16(values) => convert(values),
                Array::I16(values) => convert(values),
                Array::U32(values) => convert(values),
                Array::I32(values) => convert(values),
                Array::U64(values) => convert(values),
                Array::I64(values) => convert(values),
                Array::Bool(values) => convert(values),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns an optional integer.
    ///
    /// # Errors
    /// [`MetadataError::WrongType`].
    pub fn optional_u32(&self, key: &str) -> Result<Option<u32>, MetadataError> {
        self.optional(key, "an unsigned 32-bit integer", || self.u32(key))
    }

    /// Returns an optional float.
    ///
    /// # Errors
    /// [`MetadataError::WrongType`].
    pub fn optional_f32(&self, key: &str) -> Result<Option<f32>, MetadataError> {
        self.optional(key, "a number", || self.f32(key))
    }

    /// Returns an optional boolean.
    ///
    /// # Errors
    /// [`MetadataError::WrongType`].
    pub fn optional_bool(&self, key: &str) -> Result<Option<bool>, MetadataError> {
        self.optional(key, "a boolean", || self.bool(key))
    }

    /// Returns an optional string.
    ///
    /// # Errors
    /// [`MetadataError::WrongType`].
    pub fn optional_str(&self, key: &str) -> Result<Option<&str>, MetadataError> {
        self.optional(key, "a string", || self.str(key))
    }

    /// Returns a required integer.
    ///
    /// # Errors
    /// [`MetadataError`].
    pub fn require_u32(&self, key: &str) -> Result<u32, MetadataError> {
        self.optional_u32(key)?.ok_or_else(|| MetadataError::Missing { key: key.to_owned() })
    }

    /// Returns a required float.
    ///
    /// # Errors
    /// [`MetadataError`].
    pub fn require_f32(&self, key: &str) -> Result<f32, MetadataError> {
        self.optional_f32(key)?.ok_or_else(|| MetadataError::Missing { key: key.to_owned() })
    }

    /// Returns a required string.
    ///
    /// # Errors
    /// [`MetadataError`].
    pub fn require_str(&self, key: &str) -> Result<&str, MetadataError> {
        self.optional_str(key)?.ok_or_else(|| MetadataError::Missing { key: key.to_owned() })
    }

    fn optional<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce() -> Option<T>,
    ) -> Result<Option<T>, MetadataError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong = || MetadataError::WrongType { key: key.to_owned(), found: value.describe(), expected };
        read().ok_or_else(wrong).map(Some)
    }
}

impl Value {
    /// Returns the name of the type, as errors and `inspect` write it: `u32`, `string`, `array of i32`.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::U8(_) => "u8",
            Value::I8(_) => "i8",
            Value::U16(_) => "u16",
            Value::I16(_) => "i16",
            Value::U32(_) => "u32",
            Value::I32(_) => "i32",
            Value::U64(_) => "u64",
            Value::I64(_) => "i64",
            Value::F32(_) => "f32",
            Value::F64(_) => "f64",
            Value::Bool(_) => "bool",
            Value::String(_) => "string",
            Value::Bytes(_) => "string (not UTF-8)",
            Value::Array(array) => array.type_name(),
        }
    }

    fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(value) => Some(value.into()),
            Value::U16(value) => Some(value.into()),
            Value::U32(value) => Some(value.into()),
            Value::U64(value) => Some(value),
            Value::I8(value) => value.try_into().ok(),
            Value::I16(value) => value.try_into().ok(),
            Value::I32(value) => value.try_into().ok(),
            Value::I64(value) => value.try_into().ok(),
            _ => None,
        }
    }

    fn as_f32(&self) -> Option<f32> {
        match *self {
            Value::F32(value) => Some(value),
            Value::F64(value) => Some(value as f32),
            // Every integer up to 2^24 is an f32.
            _ => self.as_u64().filter(|&value| value <= 1 << 24).map(|value| value as f32),
        }
    }

    /// Returns the type, with the value where it is short enough for an error message.
    fn describe(&self) -> String {
        match self {
            Value::Array(array) => format!("{} of {}", self.type_name(), array.len()),
            Value::String(text) if text.len() > 40 => format!("a long {}", self.type_name()),
            Value::Bytes(_) => self.type_name().to_owned(),
            _ => format!("{} {self}", self.type_name()),
        }
    }
}

impl Array {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match_numbers!(Array, self, values => values.len(), {
            Array::Bool(values) => values.len(),
            Array::Strings(values) => values.len(),
            Array::ByteStrings(values) => values.len(),
        })
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn type_name(&self) -> &'static str {
        match self {
            Array::U8(_) => "array of u8",
            Array::I8(_) => "array of i8",
            Array::U16(_) => "array of u16",
            Array::I16(_) => "array of i16",
            Array::U32(_) => "array of u32",
            Array::I32(_) => "array of i32",
            Array::U64(_) => "array of u64",
            Array::I64(_) => "array of i64",
            Array::F32(_) => "array of f32",
            Array::F64(_) => "array of f64",
            Array::Bool(_) => "array of bool",
            Array::Strings(_) => "array of string",
            Array::ByteStrings(_) => "array of string (not UTF-8)",
        }
    }
}

impl fmt::Display for Value {
    /// Scalars in full; strings as they are; of arrays the first elements and the length.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match_numbers!(Value, self, value => value.fmt(f), {
            Value::Bool(value) => value.fmt(f),
            Value::String(value) => f.write_str(value),
            Value::Bytes(value) => String::from_utf8_lossy(value).fmt(f),
            Value::Array(array) => array.fmt(f),
        })
    }
}

impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        fn list<T: fmt::Debug>(f: &mut fmt::Formatter<'_>, values: &[T]) -> fmt::Result {
            f.write_str("[")?;
            for (i, value) in values.iter().take(SHOWN).enumerate() {
                write!(f, "{}{value:?}", if i == 0 { "" } else { ", " })?;
            }
            match values.len() {
                0..=SHOWN => f.write_str("]"),
                len => write!(f, ", ...; {len}]"),
            }
        }
        match_numbers!(Array, self, values => list(f, values), {
            Array::Bool(values) => list(f, values),
            Array::Strings(values) => list(f, values),
            Array::ByteStrings(values) => {
                let shown: Vec<_> = values.iter().take(SHOWN).map(|v| String::from_utf8_lossy(v)).collect();
                list(f, &shown)?;
                if values.len() > SHOWN { write!(f, " (first of {})", values.len()) } else { Ok(()) }
            }
        })
    }
}
