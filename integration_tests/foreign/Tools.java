import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import org.apache.kafka.common.utils.Exit;

/**
 * Runs Kafka's command-line tools one after the other, since each start of a virtual machine takes seconds. A line is the
 * class of a tool and its arguments, with tabs between them; the answer is its exit code, the bytes that it has printed to
 * either output, and those.
 */
public class Tools {
    private static final ByteArrayOutputStream said = new ByteArrayOutputStream();
    private static int code;
    private static int size;

    /** Stands for the end of the process, which some tools catch as if it were an error of theirs. */
    private static final class Ended extends Error {
        Ended() {
            super(null, null, false, false);
        }
    }

    private static void ended(int with) {
        System.out.flush();
        if (size < 0) {
            code = with;
            size = said.size();
        }
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream out = System.out;
        PrintStream err = System.err;
        Exit.setExitProcedure((with, message) -> {
            ended(with);
            throw new Ended();
        });
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.split("\t");
            said.reset();
            size = -1;
            System.setOut(new PrintStream(said, true));
            System.setErr(System.out);
            ended(run(words));
            System.setOut(out);
            System.setErr(err);
            out.println(code + " " + size);
            out.write(said.toByteArray(), 0, size);
            out.flush();
        }
    }

    private static int run(String[] words) {
        String[] rest = new String[words.length - 1];
        System.arraycopy(words, 1, rest, 0, rest.length);
        try {
            Class.forName(words[0]).getMethod("main", String[].class).invoke(null, (Object) rest);
            return 0;
        } catch (InvocationTargetException fault) {
            if (!(fault.getCause() instanceof Ended)) {
                fault.getCause().printStackTrace();
            }
            return 1;
        } catch (ReflectiveOperationException fault) {
            fault.printStackTrace();
            return 1;
        }
    }
}
