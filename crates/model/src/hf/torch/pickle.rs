//! The pickle of a dictionary of tensors, as `torch.save` writes it.
//!
//! A pickle is a program for a stack machine that may call any function of Python. This machine knows the functions that
//! make tensors and dictionaries, and refuses all others by name. Values refer to each other by index, so a pickle of
//! any nesting needs memory in proportion to its length, and no recursion.

use std::collections::{BTreeMap, HashSet};

/// A tensor of the dictionary.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SavedTensor<'a> {
    pub(super) name: &'a str,
    pub(super) storage: Storage<'a>,
    /// First element in the storage. The others follow without gaps, row by row.
    pub(super) offset: u64,
    pub(super) shape: Vec<usize>,
}

/// An array of elements, which tensors may share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Storage<'a> {
    pub(super) element: Element,
    /// Name of its entry.
    pub(super) key: &'a str,
    pub(super) elements: u64,
}

/// Type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    Float,
    Half,
    BFloat16,
    Double,
    Long,
    Int,
    Short,
    Char,
    Byte,
    Bool,
}

/// Classes of storages.
const STORAGES: [(&str, Element); 10] = [
    ("FloatStorage", Element::Float),
    ("HalfStorage", Element::Half),
    ("BFloat16Storage", Element::BFloat16),
    ("DoubleStorage", Element::Double),
    ("LongStorage", Element::Long),
    ("IntStorage", Element::Int),
    ("ShortStorage", Element::Short),
    ("CharStorage", Element::Char),
    ("ByteStorage", Element::Byte),
    ("BoolStorage", Element::Bool),
];

/// Maximum dimensions of a tensor.
const MAX_DIMS: u32 = 8;

/// Maximum arguments of a function.
const MAX_ARGUMENTS: u32 = 8;

#[derive(Clone, Copy)]
enum Value<'a> {
    None,
    Bool,
    Int(i64),
    Text(&'a str),
    /// A range of [`Machine::elements`].
    Tuple(u32, u32),
    /// Number of a dictionary.
    Dict(u32),
    Class(Element),
    NewDict,
    NewTensor,
    /// Index in [`Machine::storages`].
    Storage(u32),
    /// Index in [`Machine::tensors`].
    Tensor(u32),
}

/// A tensor without its name.
struct Made<'a> {
    storage: Storage<'a>,
    offset: u64,
    shape: Vec<usize>,
}

#[derive(Default)]
struct Machine<'a> {
    stack: Vec<Value<'a>>,
    /// Heights of the stack at open marks.
    marks: Vec<usize>,
    memo: BTreeMap<u32, Value<'a>>,
    /// Elements of all tuples.
    elements: Vec<Value<'a>>,
    /// Number of dictionaries.
    dicts: u32,
    /// Entries of all dictionaries, in order.
    entries: Vec<(u32, Value<'a>, Value<'a>)>,
    storages: Vec<Storage<'a>>,
    tensors: Vec<Made<'a>>,
}

/// Returns the tensors in order, or a description of the problem.
pub(super) fn read(pickle: &[u8]) -> Result<Vec<SavedTensor<'_>>, String> {
    let mut machine = Machine::default();
    let mut input = Input { bytes: pickle, at: 0 };
    while let Some(opcode) = input.opcode().map_err(|problem| format!("data.pkl: {problem}"))? {
        let at = input.at - 1;
        machine.run(opcode, &mut input).map_err(|problem| format!("data.pkl, byte {at}: {problem}"))?;
    }
    if input.at != pickle.len() {
        return Err(format!("data.pkl: {} bytes follow its end", pickle.len() - input.at));
    }
    machine.finish()
}

struct Input<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Input<'a> {
    /// Returns the next opcode; `None` at the end of the program.
    fn opcode(&mut self) -> Result<Option<u8>, String> {
        let opcode = self.take(1)?[0];
        Ok((opcode != b'.').then_some(opcode))
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..len).ok_or("it is truncated")?;
        self.at += len;
        Ok(taken)
    }

    fn u8(&mut self) -> Result<u8, String> {
        Ok(self.take(1)?[0])
    }

    fn u32(&mut self) -> Result<u32, String> {
        let bytes = self.take(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    /// Text up to the end of the line.
    fn line(&mut self) -> Result<&'a str, String> {
        let rest = &self.bytes[self.at..];
        let len = rest.iter().position(|&byte| byte == b'\n').ok_or("it is truncated")?;
        let line = self.take(len + 1)?;
        str::from_utf8(&line[..len]).map_err(|_| "a name is not UTF-8".to_owned())
    }
}

impl<'a> Machine<'a> {
    fn run(&mut self, opcode: u8, input: &mut Input<'a>) -> Result<(), String> {
        match opcode {
            // PROTO
            0x80 => match input.u8()? {
                2 => {}
                other => {
                    return Err(format!("version {other} of the format is not supported (supported: 2)"));
                }
            },
            // GLOBAL
            b'c' => {
                let (module, name) = (input.line()?, input.line()?);
                self.stack.push(function(module, name)?);
            }
            // BINPUT, LONG_BINPUT, BINGET, LONG_BINGET
            b'q' => self.remember(u32::from(input.u8()?))?,
            b'r' => self.remember(input.u32()?)?,
            b'h' => self.recall(u32::from(input.u8()?))?,
            b'j' => self.recall(input.u32()?)?,
            // NONE, NEWTRUE, NEWFALSE
            b'N' => self.stack.push(Value::None),
            0x88 | 0x89 => self.stack.push(Value::Bool),
            // BININT, BININT1, BININT2, LONG1
            b'J' => self.stack.push(Value::Int((input.u32()? as i32).into())),
            b'K' => self.stack.push(Value::Int(input.u8()?.into())),
            b'M' => {
                let bytes = input.take(2)?;
                self.stack.push(Value::Int(u16::from_le_bytes([bytes[0], bytes[1]]).into()));
            }
            0x8a => {
                let len = usize::from(input.u8()?);
                self.stack.push(Value::Int(long(input.take(len)?)?));
            }
            // BINUNICODE
            b'X' => {
                let len = input.u32()? as usize;
                let text = str::from_utf8(input.take(len)?).map_err(|_| "a text is not UTF-8")?;
                self.stack.push(Value::Text(text));
            }
            // MARK, EMPTY_TUPLE, TUPLE, TUPLE1, TUPLE2, TUPLE3
            b'(' => self.marks.push(self.stack.len()),
            b')' => self.stack.push(Value::Tuple(0, 0)),
            b't' => {
                let mark = self.mark()?;
                self.tuple(mark);
            }
            0x85..=0x87 => {
                let len = usize::from(opcode - 0x84);
                let start = self.stack.len().checked_sub(len).filter(|&start| start >= self.floor());
                self.tuple(start.ok_or("a tuple has too few elements")?);
            }
            // EMPTY_DICT, SETITEM, SETITEMS
            b'}' => self.new_dict(),
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                let dict = self.top_dict()?;
                self.entries.push((dict, key, value));
            }
            b'u' => {
                let mark = self.mark()?;
                let items = self.stack.split_off(mark);
                let dict = self.top_dict()?;
                if !items.len().is_multiple_of(2) {
                    return Err("a dictionary has a key without a value".to_owned());
                }
                self.entries.extend(items.chunks_exact(2).map(|item| (dict, item[0], item[1])));
            }
            // BINPERSID, REDUCE
            b'Q' => self.storage()?,
            b'R' => self.call()?,
            // BUILD sets attributes of a dictionary, such as the versions of its modules.
            b'b' => match self.pop()? {
                Value::Dict(_) => drop(self.top_dict()?),
                _ => return Err("the attributes of an object are not a dictionary".to_owned()),
            },
            other => return Err(format!("opcode {other:#04x} is not part of a dictionary of tensors")),
        }
        Ok(())
    }

    /// The height of the stack below which nothing may be removed.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Value<'a>, String> {
        let top = if self.stack.len() > self.floor() { self.stack.pop() } else { None };
        top.ok_or_else(|| "its stack is empty".to_owned())
    }

    /// Closes the last mark, and returns the height of the stack at it.
    fn mark(&mut self) -> Result<usize, String> {
        self.marks.pop().ok_or_else(|| "a mark is missing".to_owned())
    }

    fn remember(&mut self, key: u32) -> Result<(), String> {
        let value = *self.stack.last().ok_or("its stack is empty")?;
        self.memo.insert(key, value);
        Ok(())
    }

    fn recall(&mut self, key: u32) -> Result<(), String> {
        let value = *self.memo.get(&key).ok_or("it refers to a value that it has not made")?;
        self.stack.push(value);
        Ok(())
    }

    /// Makes a tuple of the values from height `start` on.
    fn tuple(&mut self, start: usize) {
        let (first, len) = (self.elements.len() as u32, (self.stack.len() - start) as u32);
        self.elements.extend(self.stack.drain(start..));
        self.stack.push(Value::Tuple(first, len));
    }

    fn new_dict(&mut self) {
        self.dicts += 1;
        self.stack.push(Value::Dict(self.dicts));
    }

    fn top_dict(&self) -> Result<u32, String> {
        match self.stack.last() {
            Some(&Value::Dict(dict)) if self.stack.len() > self.floor() => Ok(dict),
            _ => Err("entries belong to no dictionary".to_owned()),
        }
    }

    /// Removes the arguments of a function.
    fn pop_arguments(&mut self) -> Result<Vec<Value<'a>>, String> {
        match self.pop()? {
            // A tuple may be used any number of times, so only short ones are copied.
            value @ Value::Tuple(_, 0..=MAX_ARGUMENTS) => Ok(self.tuple_of(value).to_vec()),
            _ => Err("arguments are not those of a tensor or a dictionary".to_owned()),
        }
    }

    fn tuple_of(&self, value: Value<'a>) -> &[Value<'a>] {
        match value {
            Value::Tuple(first, len) => &self.elements[first as usize..(first + len) as usize],
            _ => &[],
        }
    }

    /// Makes the storage that a tuple describes.
    fn storage(&mut self) -> Result<(), String> {
        let parts = self.pop_arguments()?;
        let [
            Value::Text("storage"),
            Value::Class(element),
            Value::Text(key),
            Value::Text(_),
            Value::Int(count),
        ] = parts[..]
        else {
            return Err("a persistent id is not that of a storage".to_owned());
        };
        let elements = u64::try_from(count).map_err(|_| "a storage has fewer than 0 elements")?;
        self.storages.push(Storage { element, key, elements });
        self.stack.push(Value::Storage(self.storages.len() as u32 - 1));
        Ok(())
    }

    fn call(&mut self) -> Result<(), String> {
        let arguments = self.pop_arguments()?;
        match self.pop()? {
            Value::NewDict if arguments.is_empty() => self.new_dict(),
            Value::NewDict => return Err("a dictionary has arguments".to_owned()),
            Value::NewTensor => self.tensor(&arguments)?,
            _ => return Err("a value that is not a function is called".to_owned()),
        }
        Ok(())
    }

    fn tensor(&mut self, arguments: &[Value<'a>]) -> Result<(), String> {
        let &[
            Value::Storage(storage),
            Value::Int(offset),
            shape @ Value::Tuple(_, 0..=MAX_DIMS),
            strides @ Value::Tuple(_, 0..=MAX_DIMS),
            Value::Bool,
            Value::Dict(_),
        ] = arguments
        else {
            return Err(
                "the arguments of a tensor are not a storage, an offset, a shape and strides".to_owned()
            );
        };
        let numbers = |tuple: Value<'a>| {
            let number = |value: &Value<'a>| match value {
                Value::Int(number) => usize::try_from(*number).ok(),
                _ => None,
            };
            self.tuple_of(tuple).iter().map(number).collect::<Option<Vec<usize>>>()
        };
        let (Ok(offset), Some(shape), Some(strides)) =
            (u64::try_from(offset), numbers(shape), numbers(strides))
        else {
            return Err("the offset, the shape or the strides of a tensor are not sizes".to_owned());
        };
        if shape.len() != strides.len() {
            return Err(format!("a tensor has {} dimensions and {} strides", shape.len(), strides.len()));
        }
        if !is_contiguous(&shape, &strides) {
            return Err(format!(
                "a tensor of the shape {shape:?} has the strides {strides:?}; save it in one piece: tensor.contiguous()"
            ));
        }
        self.tensors.push(Made { storage: self.storages[storage as usize], offset, shape });
        self.stack.push(Value::Tensor(self.tensors.len() as u32 - 1));
        Ok(())
    }

    /// Returns the tensors of the dictionary that is left on the stack.
    fn finish(self) -> Result<Vec<SavedTensor<'a>>, String> {
        let [Value::Dict(root)] = self.stack[..] else {
            return Err("data.pkl is not a dictionary of tensors".to_owned());
        };
        let mut names = HashSet::new();
        let own = self.entries.iter().filter(|(dict, ..)| *dict == root);
        own.map(|&(_, key, value)| {
            let Value::Text(name) = key else {
                return Err("data.pkl: a key of the dictionary is not a text".to_owned());
            };
            let Value::Tensor(index) = value else {
                return Err(format!("data.pkl: `{}` is not a tensor", short(name)));
            };
            if !names.insert(name) {
                return Err(format!("data.pkl: two tensors are named `{}`", short(name)));
            }
            let Made { storage, offset, shape } = &self.tensors[index as usize];
            Ok(SavedTensor { name, storage: *storage, offset: *offset, shape: shape.clone() })
        })
        .collect()
    }
}

/// Returns the function or class of a name.
fn function<'a>(module: &str, name: &str) -> Result<Value<'a>, String> {
    let storage = STORAGES.iter().find(|(class, _)| *class == name);
    match (module, name, storage) {
        ("collections", "OrderedDict", _) => Ok(Value::NewDict),
        ("torch._utils", "_rebuild_tensor_v2", _) => Ok(Value::NewTensor),
        ("torch", _, Some(&(_, element))) => Ok(Value::Class(element)),
        _ => Err(format!(
            "it uses `{}.{}`, which is not part of a dictionary of plain tensors",
            short(module),
            short(name)
        )),
    }
}

/// Returns a little-endian number in two's complement.
fn long(bytes: &[u8]) -> Result<i64, String> {
    if bytes.len() > 8 {
        return Err("a number has more than 64 bits".to_owned());
    }
    let fill = if bytes.last().is_some_and(|&byte| byte >= 0x80) { 0xff } else { 0 };
    let mut all = [fill; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    Ok(i64::from_le_bytes(all))
}

/// True if elements follow one another row by row.
fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    if shape.contains(&0) {
        return true;
    }
    let mut expected = Some(1usize);
    for (&dim, &stride) in shape.iter().zip(strides).rev() {
        // The stride of a dimension of one element is not used.
        if dim != 1 && Some(stride) != expected {
            return false;
        }
        expected = expected.and_then(|expected| expected.checked_mul(dim));
    }
    true
}

/// Returns the first characters of a name, for messages.
fn short(name: &str) -> String {
    name.chars().take(80).collect()
}
